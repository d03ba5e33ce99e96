"""`edgertd trial` without a daemon: only the slots have the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.cli import main
from edgert.versions.trial_limits import TrialLimits
from tests.support.devices import a_device

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


def test_a_trial_is_reported_as_open_and_then_as_kept_and_another_digest_has_no_trial(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with a_device(started=False) as device:
        store = device.stage()
        assert device.run("trial", "echo")["state"] == "none"
        store.activate(60)
        found = device.run("trial", "echo")
        assert (found["state"], found["release"], 0 < found["trial_left_s"] <= 60) == ("open", 1, True)
        assert device.run("trial", "echo", "--digest", "0" * 64)["state"] == "none"
        assert main(["--state", str(device.state.root), "trial", "echo"]) == 0
        assert "release 1 of echo is on trial without limits for" in capsys.readouterr().out
        store.mark_good()
        assert device.run("trial", "echo", "--wait")["state"] == "kept"


def test_a_version_that_was_rolled_back_is_reported_with_its_reason() -> None:
    with a_device(started=False) as device:
        store = device.stage()
        store.activate(60)
        store.mark_good()
        device.stage(release=2)
        digest = store.activate(60).live.digest  # type: ignore[union-attr]
        device.run("rollback", "echo")
        for words in ((), ("--digest", digest), ("--digest", digest, "--for", "0")):
            code = 9 if words else 0
            told = device.run("trial", "echo", *words, code=code)
            assert "release 2 of echo was rolled back" in told["error"]["message"] if words else told["state"] == "kept"


def test_limits_that_held_wait_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    with a_device(started=False) as device:
        store = device.stage()
        slots = store.activate(60, TrialLimits({"p99_ms": 5.0}, 1.0))
        assert slots.limits is not None
        store.commit(replace(slots, limits=replace(slots.limits, started=True, passed=True)))
        assert main(["--state", str(device.state.root), "trial", "echo", "--wait"]) == 0
        assert "stayed within all limits; mark it good with: edgertd mark-good echo" in capsys.readouterr().out
