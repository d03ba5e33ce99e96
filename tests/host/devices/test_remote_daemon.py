"""`edgertd` on a device: its answers arrive, and its errors arrive as the same classes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import cast

import pytest

from edgert.checks.status import DeviceStatus
from edgert.errors import DaemonUnreachable, DeviceError, EdgeRTError, NotBootstrapped, ReleaseTooOld, by_code
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import RemoteDaemon, answer_of, edgertd
from edgert_deploy.devices.transports import LineSink, Result, Transport

BOARD = Device("board", "ssh", "pi@board", "p", "/state", "/home")


class Answers:
    """A transport on which every command ends with the same result."""

    def __init__(self, exit_code: int, stdout: str = "", stderr: str = "") -> None:
        self._result = Result(("edgertd",), exit_code, stdout, stderr)

    def run(self, *_: object, on_stderr: LineSink = lambda line: None, **__: object) -> Result:
        for line in self._result.stderr.splitlines():
            on_stderr(line)
        return self._result


def called(answers: Answers, progress: LineSink | None = None) -> object:
    return RemoteDaemon(cast(Transport, answers), BOARD, progress).call("list-files", "echo")


def test_the_last_json_object_is_the_answer() -> None:
    assert called(Answers(0, 'a line\n{"old": 1}\n{"files": []}\n')) == {"files": []}


def test_the_lines_of_edgertd_are_passed_on_but_not_those_of_an_engine_or_a_shell() -> None:
    lines: list[str] = []
    called(Answers(0, "{}", "unpacking\nINFO: Created TensorFlow Lite XNNPACK delegate for CPU.\n"), lines.append)
    with pytest.raises(NotBootstrapped):
        called(Answers(127, stderr="sh: 1: exec: /home/venv/bin/edgertd: not found\n"), lines.append)
    assert lines == ["unpacking"]


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        (Answers(127), NotBootstrapped, "edgert bootstrap board"),
        (Answers(1, stderr="No module named 'edgert'"), NotBootstrapped, "edgert bootstrap board"),
        (
            Answers(5, json.dumps({"error": {"code": ReleaseTooOld.code, "message": "old"}})),
            ReleaseTooOld,
            "board: old",
        ),
        (Answers(1, json.dumps({"error": {"code": "of.tomorrow", "message": "new"}})), DeviceError, "board: new"),
        (
            Answers(7, json.dumps({"error": {"code": NotBootstrapped.code, "message": "/s/config.toml is missing"}})),
            NotBootstrapped,
            "edgert bootstrap board",
        ),
        (
            Answers(8, json.dumps({"error": {"code": DaemonUnreachable.code, "message": "too many new connections"}})),
            DaemonUnreachable,
            "too many new connections.*edgert logs board",
        ),
        (
            Answers(2, json.dumps({"error": {"code": "input.usage", "message": "No such option: --reason"}})),
            DeviceError,
            "--reason.*edgert bootstrap board --upgrade",
        ),
        (Answers(1, "no json", "it is broken"), DeviceError, "it is broken"),
        (Answers(0, "no json"), DeviceError, "no json"),
    ],
)
def test_errors_of_a_device_are_raised_with_their_classes(
    answers: Answers, error: type[EdgeRTError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        called(answers)
    assert type(caught.value) is error


def test_an_answer_of_another_version_is_an_error_with_the_next_step() -> None:
    with pytest.raises(DeviceError, match=r"lacks 'device'.* bootstrap it again from this host"):
        answer_of(DeviceStatus, {})


def test_each_class_is_found_by_its_code() -> None:
    assert (by_code("bundle.release_too_old"), by_code("of.tomorrow")) == (ReleaseTooOld, EdgeRTError)


def test_a_device_without_a_runtime_of_its_own_uses_this_interpreter() -> None:
    assert edgertd(BOARD) == ["/home/venv/bin/edgertd", "--state", "/state"]
    assert edgertd(replace(BOARD, transport="local"))[:3] == [sys.executable, "-m", "edgert.cli"]
