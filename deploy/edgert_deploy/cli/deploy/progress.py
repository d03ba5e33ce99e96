"""The progress of a deployment to devices, on stderr.

For one device, or with --verbose, the progress is a line for each step. For many devices, a terminal shows a live table
of the devices in progress. Without a terminal, the progress is a line after each tenth of the devices.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgert.printable import counted, printable
from edgert_deploy.cli.shared.output import CELL_CHARS_MAX, say
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.common.quantities import size_text
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.plan import Step

FIRST = "stopping: unfinished devices keep or return to their old version. Ctrl-C again detaches at once"
SECOND = "detached: a device in progress rolls back on its own when the trial ends"
STEPS = frozenset(step.value for step in Step)
DRAWN_PER_S = 4
LINES_KEPT = 8  # lines of the terminal for the headings, the last lines, and the user's output above the table
ROWS_MIN = 3


@dataclass
class _Row:
    """One device in progress."""

    begun_at: float
    step: str = "login"
    sent_bytes: int = 0
    send_bytes: int = 0
    line: str = ""


class RolloutProgress:
    """Shows a rollout in a `with` block; any thread calls `progress(device, line)`, `sent` and `done`."""

    def __init__(self, title: str, devices: int, stop: UserStop, *, verbose: bool = False) -> None:
        self._title = title
        self._devices = devices
        self._stop = stop
        self._each = verbose or devices == 1
        self._console = Console(stderr=True)
        self._rows: dict[str, _Row] = {}
        self._ended = self._failed = self._stopped = 0
        self._begun_at = time.monotonic()
        self._lock = threading.Lock()
        self._interrupts = ExitStack()
        self._live: Live | None = None

    def __enter__(self) -> RolloutProgress:
        if not self._each and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._table,
                refresh_per_second=DRAWN_PER_S,
                transient=True,
                redirect_stdout=False,  # only lines on stderr appear above the table
            )
            self._live.start()
        # The table itself shows the effect of Ctrl-C: a line written over the table would break it.
        texts = ("", "") if self._live is not None else (FIRST, SECOND)
        self._interrupts.enter_context(self._stop.on_interrupt(*texts))
        return self

    def __exit__(self, *failure: object) -> None:
        self._interrupts.close()
        if self._live is not None:
            self._live.stop()
            if self._stop.asked:
                say("", SECOND if self._stop.abandoned else FIRST)

    def __call__(self, device: str, line: str) -> None:
        """Report a line about a device, or about all devices if `device` is ""."""
        if self._each or not device:
            say(device, line)
        else:
            row = self._row(device)
            if line in STEPS:
                row.step, row.line = line, ""
            else:
                row.line = line

    def sent(self, device: str, done_bytes: int, total_bytes: int) -> None:
        row = self._row(device)
        row.sent_bytes, row.send_bytes = done_bytes, total_bytes

    def done(self, outcome: Outcome) -> None:
        with self._lock:
            self._rows.pop(outcome.device, None)
            before, self._ended = self._ended, self._ended + 1
            if outcome.result is Result.STOPPED:
                self._stopped += 1
            elif outcome.error is not None:
                self._failed += 1
            text = self._counts()
        if not self._each and self._live is None and 10 * before // self._devices < 10 * self._ended // self._devices:
            say("", text)

    def _row(self, device: str) -> _Row:
        with self._lock:
            return self._rows.setdefault(device, _Row(time.monotonic()))

    def _counts(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        stopped = f", {self._stopped} stopped" if self._stopped else ""
        return f"{self._title}: {self._ended} of {counted(self._devices, 'device')}{failed}{stopped}"

    def _table(self) -> RenderableType:
        """Return the table for the terminal: the devices in progress that fit, the longest in progress first."""
        now = time.monotonic()
        with self._lock:
            rows = list(self._rows.items())
            heading = f"{self._counts()}, {len(rows)} in progress, {_time(now - self._begun_at)}"
        fitting = max(ROWS_MIN, self._console.height - LINES_KEPT)
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("DEVICE", "STEP", "BYTES", "TIME", ""):
            table.add_column(name, no_wrap=True, justify="right" if name in ("BYTES", "TIME") else "left")
        for device, row in rows[:fitting]:
            line = printable(row.line, CELL_CHARS_MAX, newlines=False)
            table.add_row(Text(device), Text(row.step), Text(_bytes(row)), Text(_time(now - row.begun_at)), Text(line))
        shown: list[RenderableType] = [Text(heading, overflow="ellipsis", no_wrap=True), table]
        if len(rows) > fitting:
            shown.append(Text(f"and {len(rows) - fitting} more in progress"))
        if self._stop.asked:
            text = SECOND if self._stop.abandoned else FIRST
            shown.append(Text(text, overflow="ellipsis", no_wrap=True))
        return Group(*shown)


def _bytes(row: _Row) -> str:
    return f"{size_text(row.sent_bytes)} of {size_text(row.send_bytes)}" if row.send_bytes else ""


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
