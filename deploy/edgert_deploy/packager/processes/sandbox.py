"""Child processes for native code that reads users' models, so that a crash does not end the command.

Requests and answers are frames: JSON, then a payload. The parent reads nothing else from a child. So a hostile model
that controls the child cannot run code in the parent. A child limits its own memory and processor time before it
handles a request. It ends when its parent ends, because its standard input then closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from edgert.errors import EdgeRTError, by_code
from edgert.extras import missing_package
from edgert.machine import prefer_for_oom
from edgert.printable import in_short

LENGTH_BYTES = 8
STDERR_BYTES_MAX = 64 * 1024  # at most this much is read, from the end of a child's output
# The longest wait for an answer is this number times the limit of processor time.
WAIT_TIMES = 20

Answer = tuple[dict[str, Any], bytes]
Progress = Callable[[str], None]
Function = Callable[[dict[str, Any], bytes, Progress], Answer]


@dataclass(frozen=True)
class Limits:
    """Limits of one request: `time_s` of processor time, `memory_bytes` of address space (0 is no limit)."""

    memory_bytes: int
    time_s: int


class ChildFailed(Exception):
    """A child did not answer. `detail` is the signal's name, the last printed line, or the error's text."""

    def __init__(self, cause: Literal["crash", "memory", "time", "wait", "error"], detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


class Child:
    """A process that answers one request at a time. After a failure or an interruption, close it."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.idle = True  # no request failed, and none is in progress
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        # Isolated (-I): neither the working folder nor the environment can change the modules that the child imports.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child
        )

    def call(
        self,
        function: str,
        request: dict[str, Any],
        payload: bytes,
        limits: Limits,
        progress: Progress = lambda _: None,
    ) -> Answer:
        """Return the answer of `function` ("module:name") in the child. Raises ChildFailed or its EdgeRTError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.idle, overdue = False, threading.Event()
        timer = threading.Timer(limits.time_s * WAIT_TIMES, self.kill, [overdue])
        timer.daemon = True
        timer.start()
        try:
            write_frame(self._process.stdin, {"call": function, "limits": asdict(limits), "with": request}, payload)
            while "progress" in (answer := read_frame(self._process.stdout))[0]:
                progress(str(answer[0]["progress"]))
        except (OSError, EOFError, ValueError):
            code = self._process.wait()
            raise ChildFailed("wait", "") if overdue.is_set() else failure(code, self._printed()) from None
        finally:
            timer.cancel()
        self.idle = True
        return answer_or_error(*answer)

    def kill(self, overdue: threading.Event | None = None) -> None:
        if overdue is not None:
            overdue.set()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and its own children."""
        self.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            assert file is not None
            with contextlib.suppress(OSError):  # raised if the child did not read the whole request
                file.close()

    def _printed(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_BYTES_MAX))
        return self._stderr.read().decode(errors="replace")


def serve() -> None:
    """Answer the requests on stdin until it closes: the program of a child."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries goes to stderr
    prefer_for_oom(1000)
    requests: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()

    def progress(line: str) -> None:
        write_frame(answers, {"progress": line}, b"")

    while True:
        head, payload = requests.get()
        restrict(Limits(**head["limits"]))
        answer = answer_of(pkgutil.resolve_name(head["call"]), head["with"], payload, progress)
        del payload
        write_frame(answers, *answer)
        del answer


def _receive(requests: queue.SimpleQueue[Answer]) -> None:
    # Not sys.stdin, because Python aborts if it ends while a thread holds the lock of sys.stdin.
    with os.fdopen(os.dup(0), "rb") as file, contextlib.suppress(EOFError):
        while True:
            requests.put(read_frame(file))
    os._exit(1)


def answer_of(function: Function, request: dict[str, Any], payload: bytes, progress: Progress) -> Answer:
    """Return the answer of `function`. An error of any class becomes an answer, too."""
    try:
        return function(request, payload, progress)
    except EdgeRTError as error:
        return {"error": error.message, "code": error.code}, b""
    except MemoryError:
        return {"memory": True}, b""
    except Exception as error:  # noqa: BLE001 - an unforeseen error from a hostile file must become one clear message, too
        if (missing := missing_package(error)) is not None:
            return {"error": missing.message, "code": missing.code}, b""
        return {"error": in_short(error)}, b""


def answer_or_error(answer: dict[str, Any], payload: bytes) -> Answer:
    """Return the answer, or raise the error that the answer reports."""
    if "memory" in answer:
        raise ChildFailed("memory", "")
    if "code" in answer:
        raise by_code(str(answer["code"]))(str(answer["error"]))
    if "error" in answer:
        raise ChildFailed("error", str(answer["error"]))
    return answer, payload


def failure(code: int, printed: str) -> ChildFailed:
    """Return the reason for a child's end, from its exit `code` and the text that it `printed`."""
    lines = printed.strip().splitlines() or ["no message"]
    if code == -signal.SIGKILL or any("bad_alloc" in line or "MemoryError" in line for line in lines):
        return ChildFailed("memory", "")  # the kernel kills a process if the machine runs out of memory
    if code == -signal.SIGXCPU:
        return ChildFailed("time", "")
    if code < 0:
        name = signal.Signals(-code).name
        return ChildFailed("crash", f"{name}: {lines[-1][:300]}" if code == -signal.SIGABRT else name)
    return ChildFailed("error", lines[-1][:300])


def restrict(limits: Limits) -> None:
    """Apply `limits` to this process. The time counts from now. A crash leaves no core file."""
    if limits.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        memory = limits.memory_bytes if hard == resource.RLIM_INFINITY else min(limits.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(used.ru_utime + used.ru_stime) + limits.time_s
    until = until if hard == resource.RLIM_INFINITY else min(until, hard - 1)
    # A process cannot raise its memory limit again. So a child with a memory limit serves one request, and its time
    # limit is final, too.
    resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1 if limits.memory_bytes else hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def write_frame(file: IO[bytes], head: dict[str, Any], payload: bytes) -> None:
    data = json.dumps(head).encode()
    file.write(len(data).to_bytes(LENGTH_BYTES, "big") + len(payload).to_bytes(LENGTH_BYTES, "big") + data)
    file.write(payload)
    file.flush()


def read_frame(file: IO[bytes]) -> Answer:
    """Return a frame's head and payload. Raises EOFError at the file's end, ValueError if it is no frame."""
    lengths = _exactly(file, 2 * LENGTH_BYTES)
    head = json.loads(_exactly(file, int.from_bytes(lengths[:LENGTH_BYTES], "big")))
    if not isinstance(head, dict):
        raise ValueError("a frame's head is a JSON object")
    return head, _exactly(file, int.from_bytes(lengths[LENGTH_BYTES:], "big"))


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data
