"""The page shows the project's rollouts to devices that it knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgert.errors import ErrorText
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import Strategy
from tests.support.rollouts import ROLLOUT


def test_rollouts_are_read_from_disk_and_a_rollout_without_a_process_is_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    rollouts = Rollouts(RolloutStore(folder))
    rollouts.read({"pi-0"})
    assert (rollouts.shown, rollouts.revision, folder.exists()) == ([], 0, False)
    names = tuple(f"pi-{number}" for number in range(10))
    failed = Outcome("pi-1", Result.FAILED, error=ErrorText("transport.unreachable", "no answer"))
    outcomes = {"pi-0": Outcome("pi-0", Result.LIVE), "pi-1": failed}
    strategy = Strategy.parse(1, "50%,100%", "3", 8, 0)
    rollout = replace(ROLLOUT, id="digits-1", release=7, devices=names, strategy=strategy, outcomes=outcomes)
    store = RolloutStore(folder)
    store.write(rollout)
    with store.at_work("digits-1"):
        rollouts.read({"pi-0"})
        (shown,) = rollouts.shown
        assert (shown["state"], shown["took"], shown["failed_count"], shown["version"]) == ("running", 1, 1, "r7")
        assert shown["waves"] == [
            {"devices": 1, "took": 1, "failed": 0, "left": 0},
            {"devices": 4, "took": 0, "failed": 1, "left": 3},
            {"devices": 5, "took": 0, "failed": 0, "left": 5},
        ]
    rollouts.read({"pi-0"})
    assert (rollouts.shown[0]["state"], rollouts.revision) == ("cut off", 2)


def test_rollouts_of_another_brokers_fleet_do_not_appear(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for number, devices in enumerate((("pi-0", "pi-1"), ("oven",)), start=1):
        store.write(replace(ROLLOUT, id=f"digits-{number}", devices=devices, number=number))
    rollouts = Rollouts(store)

    def shown(*devices: str) -> list[str]:
        rollouts.read(set(devices))
        return [rollout["id"] for rollout in rollouts.shown]

    assert shown() == [], "no device reports to this broker"
    assert shown("oven", "saw") == ["digits-2"]
    assert shown("oven", "pi-1") == ["digits-2", "digits-1"]
