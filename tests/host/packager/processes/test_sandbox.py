"""Child processes: a request gets progress and an answer. A crash and an error of the request are distinguished."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from edgert.errors import BuildFailed
from edgert_deploy.packager.processes.sandbox import (
    Answer,
    Child,
    ChildFailed,
    Limits,
    Progress,
    answer_or_error,
    failure,
    read_frame,
    write_frame,
)
from tests.support.devices import WAIT_S_MAX

LIMITS = Limits(0, 60)


def doubled(request: dict[str, Any], payload: bytes, progress: Progress) -> Answer:
    print("a banner")
    progress("doubling")
    return {"pid": os.getpid(), **request}, payload * 2


def refuses(request: dict[str, Any], payload: bytes, progress: Progress) -> Answer:
    raise BuildFailed("no such operator")


def aborts(request: dict[str, Any], payload: bytes, progress: Progress) -> Answer:
    print("no such scale", file=sys.stderr, flush=True)
    os.abort()


def name_of(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def test_one_child_answers_request_after_request() -> None:
    lines: list[str] = []
    with closing(Child()) as child:
        first, payload = child.call(name_of(doubled), {"n": 1}, b"ab", LIMITS, lines.append)
        assert (first["n"], payload, lines) == (1, b"abab", ["doubling"])
        with pytest.raises(BuildFailed, match="no such operator"):
            child.call(name_of(refuses), {}, b"", LIMITS)
        assert child.idle
        second, _ = child.call(name_of(doubled), {}, b"", LIMITS)
        assert second["pid"] == first["pid"] != os.getpid()
        with pytest.raises(ChildFailed, match="crash: SIGABRT: no such scale"):
            child.call(name_of(aborts), {}, b"", LIMITS)
        assert not child.idle


def test_a_child_ends_when_its_standard_input_closes() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from edgert_deploy.packager.processes.sandbox import serve; serve()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(WAIT_S_MAX) == 1


@pytest.mark.parametrize(
    ("code", "printed", "cause"),
    [
        (-signal.SIGKILL, "", "memory"),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", "memory"),
        (-signal.SIGXCPU, "", "time"),
        (-signal.SIGSEGV, "", "crash"),
        (1, "ImportError: no module\n", "error"),
    ],
)
def test_the_error_names_the_cause_of_the_end_of_a_child(code: int, printed: str, cause: str) -> None:
    assert failure(code, printed).cause == cause


def test_a_child_raises_only_errors_of_edgert() -> None:
    with pytest.raises(BuildFailed, match="text"):
        answer_or_error({"code": "build.failed", "error": "text"}, b"")
    with pytest.raises(Exception, match="text") as raised:
        answer_or_error({"code": "SystemExit", "error": "text"}, b"")
    assert type(raised.value).__name__ == "EdgeRTError"


@pytest.mark.parametrize("cut", [0, 3, 18, -1])
def test_a_frame_that_is_cut_off_is_read_as_the_end(cut: int) -> None:
    file = io.BytesIO()
    write_frame(file, {"a": 1}, b"payload")
    assert read_frame(io.BytesIO(file.getvalue())) == ({"a": 1}, b"payload")
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(file.getvalue()[:cut]))
