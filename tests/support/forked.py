"""Run a function on hostile bytes in a fork of a process with its libraries loaded: a hundred cases in seconds.

    python -m tests.support.forked MODULE:FUNCTION [MODULE ...]      the MODULEs are loaded beforehand

The function is called as (request, data) under the limits of a real probe, and its answer is framed like a real
probe's. Each case has its own process. `Forked` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

from edgert.errors import EdgeRTError, SourceInvalid
from edgert_deploy.packager import sandbox
from edgert_deploy.packager.sources.probe import refusal
from tests.support.devices import WAIT_S_MAX


class Forked:
    """A process that forks for each case. `ask` is `probe.ask`, a hundred times as fast."""

    def __init__(self, function: str, limits: sandbox.Limits, *modules: str) -> None:
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
        self._process.wait(timeout=WAIT_S_MAX)

    def ask(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer one case. Raises SourceInvalid like `sandbox.ask`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        sandbox.write_frame(self._process.stdin, request, data)
        head, printed = sandbox.read_frame(self._process.stdout)
        answer = sandbox.read_frame(self._process.stdout)
        try:
            if head["code"]:
                raise sandbox.failure(head["code"], printed.decode(errors="replace"))
            return sandbox.checked(*answer)
        except sandbox.ChildFailed as error:
            raise refusal(error, self._limits) from error
        except EdgeRTError as error:
            raise SourceInvalid(error.message) from error


def _serve(function: str, limits: sandbox.Limits) -> None:
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):
        while True:
            request, data = sandbox.read_frame(sys.stdin.buffer)
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                if not (pid := os.fork()):
                    os.setsid()
                    os.dup2(err.fileno(), 2)
                    os.dup2(err.fileno(), 1)
                    sandbox.restrict(limits)
                    signal.alarm(limits.time_s)  # of waiting: processor time is not all that can pass
                    sandbox.write_frame(out, *sandbox.answered(called, request, data, lambda line: None))
                    os._exit(0)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                err.seek(0)
                sandbox.write_frame(answers, {"code": -signal.SIGXCPU if code == -signal.SIGALRM else code}, err.read())
                if code:
                    sandbox.write_frame(answers, {}, b"")
                else:
                    out.seek(0)
                    sandbox.write_frame(answers, *sandbox.read_frame(out))


if __name__ == "__main__":
    for module in sys.argv[4:]:
        importlib.import_module(module)
    _serve(sys.argv[1], sandbox.Limits(int(sys.argv[2]), int(sys.argv[3])))
