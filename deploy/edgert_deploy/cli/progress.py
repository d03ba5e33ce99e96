"""How a build goes, on stderr: a bar a target with its stage, and an estimate; plain lines where stderr is no terminal.

The build flow says what it does in lines, `TARGET: stage`, or `tool: what it does now`. Each artifact of a target has two
stages that always come, building and judging; what comes on top (a search, measuring) lengthens no bar.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

STAGE = re.compile(r"([a-z0-9-]+): ((?:building|judging) .*)")
STAGES_AN_ARTIFACT = 2
SHOWN_LETTERS_MAX = 60


class BuildProgress:
    """`with BuildProgress({target: artifacts}) as say: ... say(line)`; `done(target)` fills a target's bar."""

    def __init__(self, artifacts: Mapping[str, int]) -> None:
        self._artifacts = artifacts
        self._bars: _Bars | None = None

    def __enter__(self) -> BuildProgress:
        if Console(stderr=True).is_terminal:
            self._bars = _Bars(self._artifacts)
        return self

    def __call__(self, line: str) -> None:
        if self._bars is None:
            click.echo(line, err=True)
        else:
            self._bars.say(line)

    def done(self, target: str) -> None:
        if self._bars is not None:
            self._bars.fill(target)

    def print(self, write: Callable[[], None]) -> None:
        """Let `write` print a result while bars stand on the terminal."""
        if self._bars is None:
            write()
        else:
            self._bars.aside(write)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.close()


class _Bars:
    def __init__(self, artifacts: Mapping[str, int]) -> None:
        # A descriptor of its own: vendors' tools have theirs turned away while they work (quiet.py).
        self._file = os.fdopen(os.dup(sys.stderr.fileno()), "w")
        self._progress = Progress(
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[stage]}", markup=False),
            console=Console(file=self._file, force_terminal=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {
            target: self._progress.add_task(
                target, total=STAGES_AN_ARTIFACT * count, name=target, stage="waits", start=False
            )
            for target, count in artifacts.items()
        }
        self._seen: set[str] = set()
        self._current: str | None = None
        self._progress.start()

    def say(self, line: str) -> None:
        found = STAGE.fullmatch(line)
        if found and found[1] in self._tasks:
            self._enter(found[1], line)
        target = line.partition(": ")[0]
        if line.startswith("warning: "):
            self._progress.console.print(line, markup=False, highlight=False)
        elif target in self._tasks or self._current is not None:
            shown = line.partition(": ")[2] if target in self._tasks else line
            task = self._tasks[target if target in self._tasks else str(self._current)]
            self._progress.update(task, stage=shown[:SHOWN_LETTERS_MAX], refresh=True)

    def _enter(self, target: str, line: str) -> None:
        """A stage begins, and the one before it is over. What was built ahead is said twice, and counts once."""
        task = self._tasks[target]
        self._progress.start_task(task)
        if line not in self._seen and self._current is not None and self._seen:
            self._progress.advance(self._tasks[self._current])
        self._seen.add(line)
        self._current = target

    def fill(self, target: str) -> None:
        task = self._tasks[target]
        total = next(one.total for one in self._progress.tasks if one.id == task)
        self._progress.start_task(task)
        self._progress.update(task, completed=total, stage="done", refresh=True)

    def aside(self, write: Callable[[], None]) -> None:
        self._progress.stop()
        write()
        sys.stdout.flush()
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()
        self._file.close()
