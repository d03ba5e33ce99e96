"""`edgertd activate` without a daemon."""

from __future__ import annotations

import pytest

from edgert.cli import main
from tests.support.devices import Device, a_device


def text_of(device: Device, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["--state", str(device.state.root), "activate", "echo", *words]) == code
    return "".join(capsys.readouterr())


def test_a_version_goes_on_trial_and_the_answer_says_how_to_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device(started=False) as device:
        device.stage()
        said = text_of(device, capsys, "--trial", "90s")
        assert "live on trial for 90s; keep it with: edgertd mark-good echo" in said
        assert "no daemon runs" in said


def test_limits_that_cannot_be_judged_are_named_and_the_other_limits_are_watched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with a_device(started=False) as device:
        store = device.stage()
        said = text_of(device, capsys, "--limit", "agreement=90%", "--limit", "p99_ms=5", "--unattended")
        assert "not watched: agreement: no earlier version exists" in said
        assert "watched for 1m; follow it with: edgertd trial echo --wait" in said
        limits = store.read().limits
        assert limits is not None
        assert (limits.bounds, limits.unattended) == ({"p99_ms": 5.0}, True)


def test_wrong_options_leave_the_slots_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device(started=False) as device:
        before = device.stage().read()
        assert "add --limit or --watch" in text_of(device, capsys, "--unattended", code=2)
        assert "speed" in text_of(device, capsys, "--limit", "speed=1", code=4)
        for wrong in (("--trial", "nan"), ("--trial", "0.5s"), ("--watch", "60")):
            text_of(device, capsys, *wrong, code=2)
        assert device.stage().read() == before
