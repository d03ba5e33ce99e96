"""Files that hosts left behind are removed, unless a host can still resume their transfer."""

from __future__ import annotations

import os
from pathlib import Path

from edgert.daemon.system.incoming import CHECK_S, LEFT_S_MAX, PARTIAL_S_MAX, WATCHED_S_MIN, IncomingFolder

WALL_S = 1.8e9


class Days:
    """A folder with an interrupted transfer, a complete file and a folder, and clocks that the test moves."""

    def __init__(self, tmp_path: Path) -> None:
        tmp_path.mkdir(exist_ok=True)
        self.now_s, self.wall_s, self.synced = 0.0, WALL_S, True
        self.part = tmp_path / ".echo-2.edgert.0123.part"
        self.whole = tmp_path / "echo-2.edgert"
        self.bench = tmp_path / "bench-1"
        self.part.write_bytes(b"x")
        self.whole.write_bytes(b"x")
        self.bench.mkdir()
        (self.bench / "input.npy").write_bytes(b"x")
        for path in (self.part, self.whole, self.bench):
            os.utime(path, (WALL_S, WALL_S))
        self.incoming = IncomingFolder(tmp_path, lambda: self.now_s, lambda: self.wall_s, lambda: self.synced)

    def passes(self, seconds: float) -> None:
        """Let time pass, with a check after each period."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.incoming.clean()
            self.now_s, self.wall_s = self.now_s + CHECK_S, self.wall_s + CHECK_S
        self.incoming.clean()

    @property
    def there(self) -> list[bool]:
        return [path.exists() for path in (self.part, self.whole, self.bench)]


def test_an_interrupted_transfer_can_be_resumed_for_a_week_and_is_removed_then(tmp_path: Path) -> None:
    days = Days(tmp_path)
    days.passes(LEFT_S_MAX - CHECK_S)
    assert days.there == [True, True, True]
    days.passes(2 * CHECK_S)
    assert days.there == [True, False, False]
    days.passes(PARTIAL_S_MAX - LEFT_S_MAX - 3 * CHECK_S)
    assert days.part.exists()
    days.passes(4 * CHECK_S)
    assert not days.part.exists()


def test_a_transfer_that_continues_is_kept_for_another_week(tmp_path: Path) -> None:
    days = Days(tmp_path)
    days.passes(PARTIAL_S_MAX - 10 * CHECK_S)
    days.part.write_bytes(b"xx")
    os.utime(days.part, (days.wall_s, days.wall_s))
    days.passes(20 * CHECK_S)
    assert days.part.exists()


def test_files_stay_while_the_clock_is_not_synced_and_soon_after_it_jumped(tmp_path: Path) -> None:
    days = Days(tmp_path)
    days.synced = False
    days.passes(2 * PARTIAL_S_MAX)
    assert days.there == [True, True, True]
    jumped = Days(tmp_path / "jumped")
    jumped.passes(CHECK_S)
    jumped.wall_s += 50 * 365 * 86400.0
    jumped.passes(WATCHED_S_MIN - 3 * CHECK_S)
    assert jumped.there == [True, True, True], "a host may be going on with it right now"
