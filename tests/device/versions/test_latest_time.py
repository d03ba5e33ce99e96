"""The latest time that a device has seen: the times that are used, and the moments when a time is stored."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import pytest

from edgert.bundle.expiry import expiry_time
from edgert.durable import locked
from edgert.errors import StorageFailed
from edgert.state_dir import StateDir
from edgert.versions import latest_time
from edgert.versions.latest_time import CHECK_S, STORE_STEP_S, LatestTime
from tests.support.devices import nothing_may_be_written

NOW_S = expiry_time("2026-11-22T08:00:00Z")


class Clocks:
    """A device whose clocks the test sets."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder)
        self.wall_s, self.synced = NOW_S, True
        self.latest = LatestTime(self.state, lambda: self.wall_s, lambda: self.synced)
        self.kept = folder / "latest_time.json"

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.latest.store_clock()


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path)


def test_the_latest_time_follows_the_clock_and_never_goes_back(clocks: Clocks) -> None:
    assert clocks.latest.now_s() == NOW_S
    clocks.latest.store_clock()
    clocks.wall_s = 0.0
    assert clocks.latest.now_s() == NOW_S
    clocks.wall_s = NOW_S + 5
    assert clocks.latest.now_s() == NOW_S + 5


def test_the_time_of_a_clock_without_a_time_source_is_not_stored(clocks: Clocks) -> None:
    clocks.synced, clocks.wall_s = False, NOW_S * 2
    clocks.latest.store_clock()
    assert not clocks.kept.exists()
    clocks.wall_s = NOW_S
    assert clocks.latest.now_s() == NOW_S


def test_the_latest_time_is_written_once_a_day(clocks: Clocks) -> None:
    clocks.latest.store_clock()
    first = clocks.kept.read_bytes()
    for _ in range(int(STORE_STEP_S / CHECK_S)):
        clocks.passes(CHECK_S)
        assert clocks.kept.read_bytes() == first
    clocks.passes(CHECK_S)
    assert clocks.kept.read_bytes() != first


def test_an_earlier_time_is_not_stored(clocks: Clocks) -> None:
    clocks.latest.store(NOW_S)
    clocks.latest.store(NOW_S - 1)
    clocks.wall_s = 0.0
    assert clocks.latest.now_s() == NOW_S


def test_the_times_of_the_files_of_a_bootstrap_count(clocks: Clocks) -> None:
    clocks.wall_s = 0.0
    clocks.state.config.write_text("")
    os.utime(clocks.state.config, (NOW_S, NOW_S))
    assert clocks.latest.now_s() == NOW_S


def test_a_process_that_stores_an_earlier_time_does_not_undo_a_store_of_another_process(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon, the follower and the installs of several models store times at once."""

    def other_process_stores_first(path: Path, wait_s: float) -> FileIO:
        monkeypatch.undo()
        clocks.latest.store(NOW_S + 1)
        return locked(path, wait_s)

    monkeypatch.setattr(latest_time, "locked", other_process_stores_first)
    clocks.latest.store(NOW_S)
    clocks.wall_s = 0.0
    assert clocks.latest.now_s() == NOW_S + 1


def test_the_daemon_does_not_wait_for_a_process_that_stores_a_time(clocks: Clocks) -> None:
    with locked(clocks.kept.with_suffix(".lock")):
        clocks.latest.store_clock()
    assert not clocks.kept.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"latest": 3}', b'{"latest": "soon"}', b"\xff"])
def test_a_damaged_record_is_ignored_and_replaced(clocks: Clocks, content: bytes) -> None:
    clocks.kept.write_bytes(content)
    assert clocks.latest.now_s() == NOW_S
    clocks.latest.store(NOW_S)
    assert b"2026" in clocks.kept.read_bytes()


def test_a_full_disk_stops_an_install_but_not_the_daemon(clocks: Clocks) -> None:
    with nothing_may_be_written():
        clocks.latest.store_clock()
        with pytest.raises(StorageFailed, match="latest_time"):
            clocks.latest.store(NOW_S)


def test_a_time_far_ahead_of_a_synchronized_clock_is_not_stored(clocks: Clocks) -> None:
    """A host with a clock years ahead signed the bundle. With its time, the device would accept no update for years."""
    clocks.latest.store(NOW_S + 10 * 365 * 86_400)
    assert (clocks.latest.now_s(), clocks.kept.exists()) == (NOW_S, False)
    clocks.latest.store(NOW_S + 3600)
    assert clocks.latest.now_s() == NOW_S + 3600
    clocks.synced = False  # the clock of a board without a battery may be years behind
    clocks.latest.store(NOW_S + 10 * 365 * 86_400)
    assert clocks.latest.now_s() == NOW_S + 10 * 365 * 86_400
