"""The probe of models as forks of a process with the libraries loaded: a hundred models in seconds.

    python -m tests.support.stand_ins.forked [MODULE ...]      the MODULEs are loaded beforehand

Each request has its own process, under the limits of a real probe, and its answer is framed like a real probe's.
`Forked` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import Any

from edgert.errors import EdgeRTError, SourceInvalid
from edgert_deploy.packager.processes import sandbox
from edgert_deploy.packager.sources.probe import ENVIRONMENT, refusal
from tests.support.devices import WAIT_S_MAX
from tests.support.paths import ROOT


class Forked:
    """A process that forks for each request. `ask` replaces `probe.run_in_child`, a hundred times as fast."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stand_ins.forked", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=ROOT,
        )

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=WAIT_S_MAX)

    def ask(self, function: str, request: dict[str, Any], data: bytes, limits: sandbox.Limits) -> sandbox.Answer:
        """Return the answer of `function` ("module:name") in a fork. Every failure raises SourceInvalid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"call": function, "limits": asdict(limits), "with": request}
        sandbox.write_frame(self._process.stdin, asked, data)
        head, printed = sandbox.read_frame(self._process.stdout)
        answer = sandbox.read_frame(self._process.stdout)
        try:
            if head["code"]:
                raise sandbox.failure(head["code"], printed.decode(errors="replace"))
            return sandbox.answer_or_error(*answer)
        except sandbox.ChildFailed as error:
            raise refusal(error, limits) from error
        except EdgeRTError as error:
            raise SourceInvalid(error.message) from error


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):
        while True:
            head, data = sandbox.read_frame(sys.stdin.buffer)
            module, _, name = head["call"].partition(":")
            called, limits = getattr(importlib.import_module(module), name), sandbox.Limits(**head["limits"])
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                if not (pid := os.fork()):
                    os.setsid()
                    os.dup2(err.fileno(), 2)
                    os.dup2(err.fileno(), 1)
                    sandbox.restrict(limits)
                    signal.alarm(limits.time_s)  # of waiting: processor time is not all that can pass
                    sandbox.write_frame(out, *sandbox.answer_of(called, head["with"], data, lambda line: None))
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
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _serve()
