"""Work on several devices: who fails holds up nobody, and what one shows to be wrong is not tried on the others."""

from __future__ import annotations

from edgert.errors import DeviceUnreachable, EdgeRTError, RolledBack
from edgert_deploy.cli.each import on_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import Transport

DEVICES = [Device(f"d{n}", "local", "/nowhere", "this-machine", "/nowhere") for n in range(4)]


def codes(failing: dict[str, EdgeRTError], *, one_first: bool) -> tuple[list[str], list[str]]:
    """What became of each, and who was asked, in order."""
    asked: list[str] = []

    def work(device: Device, _: Transport) -> str:
        asked.append(device.name)
        if device.name in failing:
            raise failing[device.name]
        return "done"

    answers = on_each(DEVICES, work, one_first=one_first)
    return [a.code if isinstance(a, EdgeRTError) else a for a in answers], asked


def test_one_that_fails_holds_up_nobody() -> None:
    answers, asked = codes({"d1": RolledBack("no")}, one_first=False)
    assert answers == ["done", "deploy.rolled_back", "done", "done"]
    assert sorted(asked) == ["d0", "d1", "d2", "d3"]


def test_what_the_first_shows_to_be_wrong_is_not_tried_on_the_others() -> None:
    answers, asked = codes({"d0": RolledBack("no")}, one_first=True)
    assert answers == ["deploy.rolled_back"] * 4
    assert asked == ["d0"]


def test_one_that_cannot_be_reached_shows_nothing() -> None:
    gone = {"d0": DeviceUnreachable("off"), "d1": RolledBack("no")}
    answers, asked = codes(gone, one_first=True)
    assert answers == ["device.unreachable", "deploy.rolled_back", "deploy.rolled_back", "deploy.rolled_back"]
    assert asked == ["d0", "d1"]
    answers, asked = codes({"d0": DeviceUnreachable("off")}, one_first=True)
    assert answers == ["device.unreachable", "done", "done", "done"]
