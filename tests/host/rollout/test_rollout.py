"""A rollout runs in waves, stops after too many failures, and continues after an interruption."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import DeviceUnreachable, HealthCheckFailed, exit_code_of
from edgert_deploy.devices.inventory import Device
from edgert_deploy.rollout.deployment import Outcome
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.rollout import roll_out
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import Strategy
from tests.support.bundles import make_null_bundle
from tests.support.rollouts import ROLLOUT
from tests.support.stand_ins.simulated_device import BOARD, RELEASE_1, SimulatedDevice


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Fleet:
    """Simulated devices d0 ... and a rollout of release 2 to them. `said` has the lines of the rollout."""

    def __init__(self, folder: Path, count: int, **strategy: Any) -> None:
        self.key: SigningKey = new_key()
        self.bundle = make_null_bundle(folder / "bundle", self.key, release=2)
        self.simulated = {f"d{i}": SimulatedDevice(self.key, RELEASE_1) for i in range(count)}
        self.devices = [Device(**{**vars(BOARD), "name": name, "address": name}) for name in self.simulated]
        self.store = RolloutStore(folder / "rollouts")
        self.said: list[str] = []
        self.request = self.a_request()
        words = {"canary": 0, "waves": "", "max_failures": None, "parallel": 1, "pause_s": 0.0, **strategy}
        self.rollout = replace(
            ROLLOUT,
            number=1,
            bundle=str(self.bundle),
            digest=self.request.offer.digest,
            devices=tuple(self.simulated),
            strategy=Strategy.parse(**words),
        )

    def a_request(self) -> DeployRequest:
        return DeployRequest(self.bundle, read_offer(self.bundle), 60.0, lambda device: self.simulated[device.name])

    def go_on(self) -> Rollout:
        """Start the rollout like `edgert deploy`, or continue its record like `edgert rollout resume`."""
        if self.rollout.id in {rollout.id for rollout in self.store.all()}:
            self.rollout = self.store.read(self.rollout.id)
        self.request = self.a_request()
        return roll_out(self.store, self.rollout, self.request, self.devices, lambda name, line: self.said.append(line))

    @property
    def touched(self) -> list[str]:
        return [name for name, device in self.simulated.items() if device.done]


def test_a_rollout_runs_in_waves_and_stores_every_outcome_on_disk(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 6, canary=1, waves="50%", parallel=3)
    ended = fleet.go_on()
    assert (ended.state, ended.left) == (RolloutState.DONE, [])
    assert [line for line in fleet.said if "wave" in line] == [
        "wave 1 of 3: 1 device",
        "wave 2 of 3: 2 devices",
        "wave 3 of 3: 3 devices",
    ]
    assert fleet.store.read(ended.id) == ended
    assert exit_code_of(ended.errors) == 0


def test_a_rollout_stops_at_a_failed_canary_and_continues_after_the_repair(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, 4, canary=1)
    fleet.simulated["d0"].faults["check"] = HealthCheckFailed("too slow")
    ended = fleet.go_on()
    assert (ended.state, fleet.touched) == (RolloutState.STOPPED, ["d0"])
    assert ended.reason == "1 of 1 device failed, more than --max-failures 0"
    assert exit_code_of(ended.errors) == 9
    fleet.simulated["d0"].faults.clear()
    assert fleet.go_on().state == RolloutState.DONE
    assert exit_code_of(fleet.store.read(ended.id).errors) == 0


def test_within_a_wave_no_further_device_is_started_once_too_many_have_failed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 20, max_failures="10%", parallel=1)
    for name in ("d1", "d3", "d5", "d7"):
        fleet.simulated[name].faults["check"] = HealthCheckFailed("too slow")
    ended = fleet.go_on()
    assert (ended.state, "d5" in fleet.touched, "d19" in fleet.touched) == (RolloutState.STOPPED, True, False)
    assert len(ended.left) >= 14


def test_an_unreachable_device_does_not_delay_the_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    fleet.simulated["d1"].faults["status"] = DeviceUnreachable("gone")
    ended = fleet.go_on()
    assert (ended.state, ended.left, exit_code_of(ended.errors)) == (RolloutState.DONE, ["d1"], 6)


def test_a_file_that_vanishes_on_this_host_fails_one_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, 3)

    def put(*_: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/cache/delta")

    monkeypatch.setattr(fleet.simulated["d1"], "put", put)
    ended = fleet.go_on()
    assert (ended.state, ended.left) == (RolloutState.DONE, ["d1"])
    (error,) = filter(None, ended.errors)
    assert error.message.startswith("/cache/delta: No such file or directory (on this host)")


def test_a_rollout_continues_where_its_host_died_in_a_wave(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 4, waves="50%")

    def die(verb: str) -> None:
        if verb == "install":
            os._exit(1)

    fleet.simulated["d2"].before = die
    child = os.fork()
    if not child:
        fleet.go_on()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    cut_off = fleet.store.read(fleet.rollout.id)
    assert (cut_off.state, cut_off.left) == (RolloutState.RUNNING, ["d2", "d3"])
    assert not fleet.store.is_at_work(cut_off.id)
    fleet.simulated["d2"].before = lambda verb: None
    assert fleet.go_on().left == []
    assert fleet.touched == ["d2", "d3"], "those that had it are not asked again"


def test_a_stop_during_the_pause_ends_the_rollout_as_stopped(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, canary=1, pause_s=3600.0)
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(fleet.store.read(fleet.rollout.id).state)
        fleet.request.stop.press()

    ended = roll_out(fleet.store, fleet.rollout, fleet.request, fleet.devices, lambda name, line: None, sleep)
    assert (waited, ended.state, ended.left) == (["paused"], RolloutState.STOPPED, ["d1"])


def test_a_bundle_that_changes_during_the_rollout_reaches_no_further_device(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, canary=1)

    def build_again(outcome: Outcome) -> None:
        make_null_bundle(tmp_path / "other", fleet.key, release=2, op="zeros").replace(fleet.bundle)

    ended = roll_out(
        fleet.store, fleet.rollout, fleet.request, fleet.devices, lambda name, line: None, on_outcome=build_again
    )
    error = ended.errors[1]
    assert (ended.left, fleet.touched) == (["d1"], ["d0"])
    assert error is not None
    assert "changed since this command read it" in error.message


def test_an_outcome_adds_one_line_however_large_the_fleet_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 300, parallel=8)
    ended = fleet.go_on()
    lines = fleet.store.path(ended.id).read_text().splitlines()
    begun, done = 1, 1
    assert (ended.left, len(lines), len(set(lines))) == ([], begun + 300 + done, begun + 300 + done)
