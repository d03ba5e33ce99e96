"""The page shows the rollouts of this host's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.rollout.rollout_store import Rollout, RolloutStore
from edgert_deploy.rollout.waves import Strategy


def test_rollouts_are_read_from_disk_and_one_that_nobody_works_on_is_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    rollouts = Rollouts(folder)
    rollouts.look()
    assert (rollouts.shown, rollouts.revision, folder.exists()) == ([], 0, False)
    names = tuple(f"pi-{number}" for number in range(10))
    failed = {"result": "failed", "error": {"code": "transport.unreachable", "message": "no answer"}}
    outcomes: dict[str, Any] = {"pi-0": {"result": "live", "error": None}, "pi-1": failed}
    rollout = Rollout(
        "digits-1", "b", "d", "digits", 7, "i", names, Strategy.parse(1, "50%,100%", "3", 8, 0), 30.0, outcomes=outcomes
    )  # fmt: skip
    store = RolloutStore(folder)
    store.write(rollout)
    with store.at_work("digits-1"):
        rollouts.look()
        (shown,) = rollouts.shown
        assert (shown["state"], shown["took"], shown["failed_count"], shown["version"]) == ("running", 1, 1, "r7")
        assert shown["waves"] == [
            {"devices": 1, "took": 1, "failed": 0, "left": 0},
            {"devices": 4, "took": 0, "failed": 1, "left": 3},
            {"devices": 5, "took": 0, "failed": 0, "left": 5},
        ]
    rollouts.look()
    assert (rollouts.shown[0]["state"], rollouts.revision) == ("cut off", 2)
