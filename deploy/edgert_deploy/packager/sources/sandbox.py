"""A child process with bounded memory and time, for native code that reads what others made.

The child puts the limits on itself before it touches anything untrusted. The parent waits with a
time-out of its own, and only ever takes bytes back: JSON, and a payload behind it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgert.errors import EdgeRTError, SourceInvalid

GIB = 1024**3
MEMORY_BYTES_MIN = 4 * GIB  # of address space: the libraries alone map more than one
MEMORY_PER_BYTE = 6  # the file, its parsed forms and the runtime's copies of the weights
TIME_S_MIN = 60
BYTES_PER_S = 10_000_000  # what the slowest machine that we know of checks and runs, of weights
HEADER_BYTES = 8
# Threads reserve address space each, and one run needs none.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Limits:
    """`memory_bytes` of address space; `time_s` of processor time, and of waiting."""

    memory_bytes: int
    time_s: int

    @classmethod
    def for_file(cls, size_bytes: int) -> Limits:
        return cls(MEMORY_BYTES_MIN + MEMORY_PER_BYTE * size_bytes, TIME_S_MIN + size_bytes // BYTES_PER_S)


def ask(function: str, request: dict[str, Any], payload: bytes, limits: Limits) -> tuple[dict[str, Any], bytes]:
    """What `function` ("module:name", called with request and payload) answers in a child process.

    Raises SourceInvalid with what it raised as such, and where it died, ran out of memory or of time.
    """
    module, _, name = function.partition(":")
    # Isolated (-I), so that neither the working folder nor the environment chooses what the child imports.
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from edgert_deploy.packager.sources import sandbox; "
        f"sandbox.serve({module!r}, {name!r}, {limits.memory_bytes}, {limits.time_s})"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            input=framed(request, payload),
            capture_output=True,
            timeout=limits.time_s,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired as error:
        raise SourceInvalid(_too_slow(limits)) from error
    return answer_of(done, limits)


def serve(module: str, name: str, memory_bytes: int, time_s: int) -> None:
    """What the child runs: a request on stdin, an answer on the stdout that it was started with."""
    restrict(Limits(memory_bytes, time_s))
    answers = os.dup(1)
    os.dup2(2, 1)  # what the libraries print goes to stderr
    data = sys.stdin.buffer.read()
    import importlib

    function = getattr(importlib.import_module(module), name)
    with os.fdopen(answers, "wb") as out:
        out.write(answered(function, data))


def answered(function: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]], data: bytes) -> bytes:
    """The answer of `function` to a framed request, framed; errors of ours and lack of memory are answers, too."""
    request, payload = unframed(data)
    del data
    try:
        return framed(*function(request, payload))
    except EdgeRTError as error:
        return framed({"error": error.message}, b"")
    except MemoryError:
        return framed({"memory": True}, b"")
    except Exception as error:  # noqa: BLE001 - what nobody foresaw in a hostile file is still one clear error
        return framed({"error": f"the model could not be checked: {type(error).__name__}: {str(error)[:300]}"}, b"")


def restrict(limits: Limits) -> None:
    """Put `limits` on this process, for good; a crash leaves no core file."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = limits.memory_bytes if hard == resource.RLIM_INFINITY else min(limits.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.time_s, limits.time_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_of(done: subprocess.CompletedProcess[bytes], limits: Limits) -> tuple[dict[str, Any], bytes]:
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == -signal.SIGKILL or any("bad_alloc" in line or "MemoryError" in line for line in said):
        raise SourceInvalid(_too_large(limits))  # killed from outside: the machine itself ran out of memory
    if done.returncode == -signal.SIGXCPU:
        raise SourceInvalid(_too_slow(limits))
    if done.returncode < 0:
        raise SourceInvalid(
            f"the model crashes the tools that read it (signal {-done.returncode}); the file is damaged: export it again"
        )
    try:
        answer, payload = unframed(done.stdout)
    except ValueError as error:
        raise SourceInvalid(f"the model could not be checked: {(said or ['no message'])[-1][:300]}") from error
    if "memory" in answer:
        raise SourceInvalid(_too_large(limits))
    if "error" in answer:
        raise SourceInvalid(str(answer["error"]))
    return answer, payload


def _too_slow(limits: Limits) -> str:
    return (
        f"checking the model and running it once took more than {limits.time_s} s, the limit for its size: "
        "is there a loop in it that does not end, or an axis that is far too long?"
    )


def _too_large(limits: Limits) -> str:
    return (
        f"checking the model and running it once took more than {limits.memory_bytes / GIB:.1f} GiB of memory, the limit "
        "for its size: is an axis or a tensor far too large?"
    )


def framed(value: dict[str, Any], payload: bytes) -> bytes:
    head = json.dumps(value).encode()
    return len(head).to_bytes(HEADER_BYTES, "big") + head + payload


def unframed(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
    value: dict[str, Any] = json.loads(data[HEADER_BYTES:end])
    return value, data[end:]
