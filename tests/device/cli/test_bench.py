"""`edgertd bench`: the refusals before any measurement."""

from __future__ import annotations

import pytest

from edgert.cli import main
from edgert.versions.trial_limits import TrialLimits
from tests.support.devices import Device, a_device

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


def test_a_measurement_needs_a_folder_or_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device(started=False) as device:
        assert main(["--state", str(device.state.root), "bench"]) == 2
        assert "give a FOLDER with artifacts, or --model NAME" in capsys.readouterr().err


def refusal(device: Device, code: int) -> str:
    return str(device.run("bench", "--model", "echo", "--for", "0.01s", code=code)["error"]["message"])


def test_a_model_that_is_watched_or_is_not_served_is_not_measured() -> None:
    with a_device(started=False) as device:
        store = device.stage()
        store.activate(60, TrialLimits({"p99_ms": 5.0}, 60.0))
        assert "wait for the end of the trial (edgertd trial echo --wait)" in refusal(device, 7)
        store.mark_good(force=True)
        assert "edgertd start" in refusal(device, 8)
        assert device.run("claim", "echo", "--by", "ann@desk")["token"]  # the benchmark's own claim has ended
