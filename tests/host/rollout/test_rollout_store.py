"""Rollouts on disk: their order, their lock, and files that are none."""

from __future__ import annotations

import fcntl
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.rollout.rollout_store import ABORTED, DONE, KEPT_MAX, STOPPED, Rollout, RolloutStore
from edgert_deploy.rollout.waves import Strategy

ROLLOUT = Rollout("echo-r2-1", "b", "digest", "echo", 2, "inventory.toml", ("a", "b", "c"), Strategy(), 60.0)


def ended(state: str = DONE, **results: str) -> Rollout:
    """A rollout with these results by device."""
    outcomes: dict[str, Any] = {name: {"result": result, "error": None} for name, result in results.items()}
    return replace(ROLLOUT, state=state, outcomes=outcomes)


@pytest.mark.parametrize(
    ("rollout", "left", "changed", "resumable"),
    [
        (ended(a="live", b="unchanged", c="failed"), ["c"], ["a"], True),
        (ended(a="failed", b="failed", c="failed"), ["a", "b", "c"], [], True),
        (ended(a="refused", b="refused", c="refused"), ["a", "b", "c"], [], False),
        (ended(a="refused", b="live"), ["a", "c"], ["b"], True),
        (ended(a="live", b="live", c="refused"), ["c"], ["a", "b"], False),
        (ended(a="live", b="live", c="live"), [], ["a", "b", "c"], False),
        (ended(ABORTED, a="live", b="failed"), ["b", "c"], ["a"], False),
    ],
)
def test_a_roll_back_concerns_devices_that_took_it_and_a_resume_those_that_may_take_it(
    rollout: Rollout, left: list[str], changed: list[str], resumable: bool
) -> None:
    assert (rollout.left, rollout.changed, rollout.resumable) == (left, changed, resumable)


def test_the_order_of_rollouts_follows_their_numbers_and_not_the_clock(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for clock in (3000.0, 1000.0, 2000.0):  # the host's clock jumps
        number = store.new_number()
        store.write(replace(ROLLOUT, id=f"r{number}", number=number, started_at=clock))
    assert [rollout.id for rollout in store.all()] == ["r3", "r2", "r1"]
    assert store.last().id == "r3"
    (tmp_path / "counter").unlink()
    assert store.new_number() == 4, "the rollouts that are there count as well"


def test_two_processes_never_get_the_same_number(tmp_path: Path) -> None:
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(RolloutStore(tmp_path).new_number())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_a_rollout_is_worked_on_by_one_process_at_a_time(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    with store.at_work("x"), pytest.raises(ConfigInvalid, match="running in another process"), store.at_work("x"):
        raise AssertionError("two at once")
    assert not store.is_at_work("never")
    assert not (tmp_path / "never.lock").exists()  # who looks leaves no trace
    with store.at_work("x"):
        assert RolloutStore(tmp_path).is_at_work("x")
    # Who looks holds it for an instant: neither another who looks nor one who begins takes that for work.
    with open(tmp_path / "x.lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        assert not store.is_at_work("x")
        threading.Timer(0.02, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
        with store.at_work("x"):
            pass


def test_old_rollouts_that_are_over_are_forgotten_and_others_never(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for number in range(KEPT_MAX + 5):
        state = STOPPED if number == 0 else ABORTED
        store.write(replace(ROLLOUT, id=f"r{number}", number=number, state=state))
    store.tidy()
    kept = [rollout.id for rollout in store.all()]
    assert len(kept) == KEPT_MAX + 1
    assert kept[-1] == "r0"


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"id": "x"})])
def test_a_file_that_is_no_rollout_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        RolloutStore(tmp_path).read("x")
    assert RolloutStore(tmp_path).all() == []


@pytest.mark.parametrize("id", ["../x", "", "a/b", ".x"])
def test_an_id_is_no_path(tmp_path: Path, id: str) -> None:
    with pytest.raises(ConfigInvalid, match="no id of a rollout"):
        RolloutStore(tmp_path).read(id)
