"""A process beside the workers is restarted, with growing pauses, and ends with the supervisor."""

from __future__ import annotations

import selectors
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.checks.channel_status import AGAIN
from edgert.daemon.system.side_process import PAUSE_S_MIN, SideProcess
from tests.support.devices import wait_until

ENDS = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
STAYS = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


class Loop:
    """A small loop like the supervisor's loop, with a clock of its own."""

    def __init__(self, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.now_s = 1000.0
        self._capsys, self._logged = capsys, list[str]()
        self.selector = selectors.DefaultSelector()
        self.process = SideProcess("it", command, self.selector, lambda: self.now_s)

    def logged(self) -> list[str]:
        """Return the lines of the log until now."""
        self._logged += self._capsys.readouterr().err.splitlines()
        return self._logged

    def turn(self) -> None:
        if self.selector.get_map():
            for key, _ in self.selector.select(0.02):
                key.data()
        self.process.tick()


@pytest.fixture
def loop(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Loop]:
    made = Loop(request.param, capsys)
    made.process.start()
    yield made
    made.process.stop()


def ends(loop: Loop, times: int) -> None:
    def ended() -> bool:
        loop.turn()
        return len(loop.logged()) == times

    wait_until(ended, f"end number {times}")


@pytest.mark.parametrize("loop", [ENDS], indirect=True)
def test_each_early_end_doubles_the_pause(loop: Loop) -> None:
    ends(loop, 1)
    assert "ended with 3" in loop.logged()[0]
    assert loop.process.due_s() == loop.now_s + PAUSE_S_MIN
    loop.now_s += PAUSE_S_MIN / 2
    loop.turn()
    assert loop.process.pid is None
    loop.now_s += PAUSE_S_MIN / 2
    ends(loop, 2)
    assert loop.process.due_s() == loop.now_s + 2 * PAUSE_S_MIN


@pytest.mark.parametrize("loop", [ENDS], indirect=True)
def test_a_long_run_resets_the_pause(loop: Loop) -> None:
    ends(loop, 1)
    loop.now_s += PAUSE_S_MIN
    loop.process.tick()
    loop.now_s += 3600
    ends(loop, 2)
    assert loop.process.due_s() == loop.now_s + PAUSE_S_MIN


@pytest.mark.parametrize("loop", [STAYS], indirect=True)
def test_a_stopped_process_is_not_started_again(loop: Loop) -> None:
    pid = loop.process.pid
    assert pid is not None
    loop.process.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert loop.process.due_s() is None


@pytest.mark.parametrize("loop", [["/nowhere/to/be/found"]], indirect=True)
def test_a_process_that_cannot_be_started_is_tried_again(loop: Loop) -> None:
    assert "cannot be started" in loop.logged()[0]
    assert loop.process.due_s() == loop.now_s + PAUSE_S_MIN


class Rounds(Loop):
    """Return a loop whose process makes one round per hour and ends with `code`."""

    def __init__(self, code: int, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__([], capsys)
        self.process = SideProcess(
            "it",
            [sys.executable, "-S", "-c", f"raise SystemExit({code})"],
            self.selector,
            lambda: self.now_s,
            pause_s_max=900.0,
            round_pause_s=lambda: 3600.0,
        )

    def until_due_in(self, pause_s: float) -> None:
        def due() -> bool:
            self.turn()
            return self.process.pid is None and self.process.due_s() == self.now_s + pause_s

        wait_until(due, f"the next round is due in {pause_s} s")


def test_the_next_round_starts_after_the_full_pause_if_a_round_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Rounds(0, capsys)
    loop.process.start_in(60.0)
    assert loop.process.pid is None
    loop.now_s += 60.0
    loop.until_due_in(3600.0)
    assert loop.logged() == []


def test_the_pauses_after_rounds_that_must_wait_grow_and_no_line_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = Rounds(AGAIN, capsys)
    loop.process.start()
    for pause_s in (5.0, 10.0, 20.0, 40.0):
        loop.until_due_in(pause_s)
        loop.now_s += pause_s
    assert loop.logged() == []


def test_a_requested_round_begins_after_the_round_in_progress(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Rounds(0, capsys)
    loop.process.start()
    loop.process.start_in(3.0)
    loop.until_due_in(3.0)
    loop.process.start_in(1.0)
    assert loop.process.due_s() == loop.now_s + 1.0
