"""A failure does not delay other devices.

With `one_first`, a failure on the first device stops the work on the others, unless the first device is unreachable.
"""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from edgert.errors import DeviceUnreachable, EdgeRTError, Interrupted, RolledBack
from edgert_deploy.cli.shared.each import Results, run_on_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import Transport

DEVICES = [Device(f"d{n}", "local", "/nowhere", "this-machine", "/nowhere") for n in range(4)]


def codes(failing: dict[str, EdgeRTError], *, one_first: bool) -> tuple[list[str], list[str]]:
    """Return the result of each device, and the devices on which the work ran, in order."""
    asked: list[str] = []

    def work(device: Device, _: Transport) -> dict[str, str]:
        asked.append(device.name)
        if device.name in failing:
            raise failing[device.name]
        return {}

    answers = run_on_each(DEVICES, work, one_first=one_first).answers
    return [answer.code if isinstance(answer, EdgeRTError) else "done" for _, answer in answers], asked


def test_a_failure_does_not_delay_other_devices() -> None:
    answers, asked = codes({"d1": RolledBack("no")}, one_first=False)
    assert answers == ["done", "deploy.rolled_back", "done", "done"]
    assert sorted(asked) == ["d0", "d1", "d2", "d3"]


def test_a_failure_on_the_first_device_stops_the_work_on_the_others() -> None:
    answers, asked = codes({"d0": RolledBack("no")}, one_first=True)
    assert answers == ["deploy.rolled_back"] * 4
    assert asked == ["d0"]


def test_an_unreachable_first_device_does_not_stop_the_work_on_the_others() -> None:
    gone = {"d0": DeviceUnreachable("off"), "d1": RolledBack("no")}
    answers, asked = codes(gone, one_first=True)
    assert answers == ["device.unreachable", "deploy.rolled_back", "deploy.rolled_back", "deploy.rolled_back"]
    assert asked == ["d0", "d1"]
    answers, asked = codes({"d0": DeviceUnreachable("off")}, one_first=True)
    assert answers == ["device.unreachable", "done", "done", "done"]


def shown(results: Results[Any], *, as_json: bool = False, code: int = 0) -> int:
    with click.Context(click.Command("x")), pytest.raises(click.exceptions.Exit) as ended:
        results.show("the table", as_json, below="the notes", code=code, model="m")
    return ended.value.exit_code


def test_results_are_shown_as_a_table_with_errors_and_notes_or_as_one_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(device: Device, _: Transport) -> dict[str, object]:
        if device.name == "d1":
            raise DeviceUnreachable("d1: off\x1b[2J")
        return {"release": 7}

    results = run_on_each(DEVICES[:2], work)
    assert shown(results) == 6
    assert capsys.readouterr().out == "the table\nd1 [device.unreachable]: off\ufffd[2J\nthe notes\n"
    assert shown(results, as_json=True) == 6
    value = json.loads(capsys.readouterr().out)
    assert (value["ok"], value["model"]) == (False, "m")
    assert value["devices"][0] == {"device": "d0", "release": 7}
    assert value["devices"][1]["error"]["code"] == "device.unreachable"


def test_the_exit_code_is_that_of_the_first_error_or_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(Results([("d0", {}), ("d1", {})]), code=12) == 12
    assert shown(Results([("d0", {}), ("d1", RolledBack("no"))]), code=12) == 9
    assert shown(Results([("d0", RolledBack("no")), ("d1", Interrupted("stop"))])) == 130
    with pytest.raises(RolledBack):
        Results([("d0", RolledBack("no"))]).show("", False)
    capsys.readouterr()
