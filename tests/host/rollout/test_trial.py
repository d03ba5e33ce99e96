"""The host waits for a device's decision on a trial, but not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import DaemonBusy
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.claims import HeldClaim
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.rollout.plan import Plan, Step
from edgert_deploy.rollout.trial import watch_trial
from tests.support.stand_ins.simulated_device import BOARD, SimulatedDevice

ANSWER: dict[str, Any] = {"model": "echo", "release": 2, "digest": "digest"}


def test_the_wait_for_a_daemon_that_hangs_ends() -> None:
    """The hanging daemon never reports the end of the trial, although the device answers every request."""
    key, limits, now = new_key(), TrialLimits({"p99_ms": 8.0}, 600.0), [0.0]
    asked: list[tuple[str, ...]] = []

    class Hung(RemoteDaemon):
        def call(self, *words: str, timeout_s: float = 0.0) -> dict[str, Any]:
            asked.append(words)
            now[0] += 5.0
            return {**ANSWER, "state": "loading"}

    plan = Plan("echo", 2, "digest", (Step.WATCH,), limits)
    claim = HeldClaim(Hung(SimulatedDevice(key), BOARD), "t", RemoteDaemon(SimulatedDevice(key), BOARD).status())
    with pytest.raises(DaemonBusy, match=r"not decided on release 2 of echo .* edgert doctor board"):
        watch_trial(claim, plan, UserStop(), lambda line: None, lambda: now[0])
    assert limits.trial_s + limits.confirm_s < now[0] < limits.trial_s + limits.confirm_s + 100
    assert len(asked) == now[0] / 5


def test_limits_that_held_on_few_answers_are_reported() -> None:
    doubt = "only 25 answers were compared"

    class Held(RemoteDaemon):
        def call(self, *words: str, timeout_s: float = 0.0) -> dict[str, Any]:
            return {
                **ANSWER,
                "state": "held",
                "phase": "held",
                "left_s": 0,
                "readings": {},
                "text": "100 requests",
                "doubt": doubt,
            }

    key, told = new_key(), list[str]()
    plan = Plan("echo", 2, "digest", (Step.WATCH,), TrialLimits({"agreement": 0.99}, 600.0))
    claim = HeldClaim(Held(SimulatedDevice(key), BOARD), "t", RemoteDaemon(SimulatedDevice(key), BOARD).status())
    assert watch_trial(claim, plan, UserStop(), told.append).doubt == doubt
    assert told[1:] == ["all limits held: 100 requests", f"warning: {doubt}"]
