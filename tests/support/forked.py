"""Runs a function on hostile bytes in a fork of a process that has its libraries loaded: a hundred cases in seconds.

    python -m tests.support.forked MODULE:FUNCTION [MODULE ...]      the MODULEs are loaded beforehand

The function is called as (request, data) under the limits that a real probe has, and its answer is framed as a real
probe's is; each case has a process of its own. `Forked` is the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

from edgert_deploy.packager.sources import sandbox as limited


class Forked:
    """A process that forks for each case. `ask` is `limited.ask`, a hundred times as fast."""

    def __init__(self, function: str, limits: limited.Limits, *modules: str) -> None:
        self._limits = limits
        command = [
            sys.executable,
            "-m",
            "tests.support.forked",
            function,
            str(limits.memory_bytes),
            str(limits.time_s),
            *modules,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def ask(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Raises SourceInvalid as `limited.ask` does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        framed = limited.framed(request, data)
        self._process.stdin.write(len(framed).to_bytes(8, "big") + framed)
        self._process.stdin.flush()
        head = json.loads(self._process.stdout.readline())
        out, err = (self._process.stdout.read(head[name]) for name in ("out", "err"))
        return limited.answer_of(subprocess.CompletedProcess([], head["code"], out, err), self._limits)


def _serve(function: str, limits: limited.Limits) -> None:
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(head, "big"))
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            if not (pid := os.fork()):
                os.setsid()
                os.dup2(err.fileno(), 2)
                os.dup2(err.fileno(), 1)
                limited.restrict(limits)
                signal.alarm(limits.time_s)  # of waiting: processor time is not all that can pass
                out.write(limited.answered(called, data))
                out.flush()
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            code = -signal.SIGXCPU if code == -signal.SIGALRM else code
            parts = []
            for file in (out, err):
                file.seek(0)
                parts.append(file.read())
            answers.write(json.dumps({"code": code, "out": len(parts[0]), "err": len(parts[1])}).encode() + b"\n")
            answers.write(b"".join(parts))
            answers.flush()


if __name__ == "__main__":
    for module in sys.argv[4:]:
        importlib.import_module(module)
    _serve(sys.argv[1], limited.Limits(int(sys.argv[2]), int(sys.argv[3])))
