"""The progress of a build on stderr: one bar for each target, or plain lines without a terminal.

The build reports lines `TARGET: stage` or `tool: step`. Each artifact of a target always has two stages, building and
judging. A bar counts only these two stages, not further stages (a search, measuring). Plain lines omit the building of
an artifact in the build cache.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edgert.cli.output import progress
from edgert.printable import printable
from edgert_deploy.packager.candidates.build_processes import FROM_CACHE

STAGE = re.compile(r"([a-z0-9-]+): ((?:building|judging) .*)")
STAGES_PER_ARTIFACT = 2
SHOWN_LETTERS_MAX = 60


class BuildProgress:
    """Shows a build: `with BuildProgress({target: artifacts}) as progress: ... progress(line)`."""

    def __init__(self, artifacts: Mapping[str, int]) -> None:
        self._artifacts = artifacts
        self._bars: _Bars | None = None

    def __enter__(self) -> BuildProgress:
        if Console(stderr=True).is_terminal:
            self._bars = _Bars(self._artifacts)
        return self

    def __call__(self, line: str) -> None:
        if self._bars is None:
            if not line.endswith(FROM_CACHE):
                progress(line)
        else:
            self._bars.show(printable(line, newlines=False))

    def done(self, target: str) -> None:
        if self._bars is not None:
            self._bars.fill(target)

    def print(self, text: str) -> None:
        """Print a result on stdout. If stdout is the terminal of the bars, the result appears above them."""
        text = printable(text)
        if self._bars is not None and _is_one_terminal(sys.stdout.fileno(), sys.stderr.fileno()):
            self._bars.print_above(text)
        else:
            click.echo(text)

    def __exit__(self, *failure: object) -> None:
        if self._bars is not None:
            self._bars.close()


class _Bars:
    def __init__(self, artifacts: Mapping[str, int]) -> None:
        # The bars need their own descriptor, because stderr is redirected while vendors' tools run (vendor_output.py).
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
                target, total=STAGES_PER_ARTIFACT * count, name=target, stage="waits", start=False
            )
            for target, count in artifacts.items()
        }
        self._seen: set[str] = set()
        self._current: str | None = None
        self._progress.start()

    def show(self, line: str) -> None:
        match = STAGE.fullmatch(line)
        if match and match[1] in self._tasks:
            self._enter(match[1], line.removesuffix(FROM_CACHE))
        target = line.partition(": ")[0]
        if line.startswith("warning: "):
            self.print_above(line)
        elif target in self._tasks or self._current is not None:
            shown = line.partition(": ")[2] if target in self._tasks else line
            task = self._tasks[target if target in self._tasks else str(self._current)]
            self._progress.update(task, stage=shown[:SHOWN_LETTERS_MAX], refresh=True)

    def _enter(self, target: str, line: str) -> None:
        """Start a stage, which ends the previous stage. A line that a parallel build repeats ends no stage."""
        self._progress.start_task(self._tasks[target])
        if line not in self._seen and self._current is not None:
            self._progress.advance(self._tasks[self._current])
        self._seen.add(line)
        self._current = target

    def fill(self, target: str) -> None:
        task = self._tasks[target]
        total = next(each.total for each in self._progress.tasks if each.id == task)
        self._progress.start_task(task)
        self._progress.update(task, completed=total, stage="done", refresh=True)

    def print_above(self, text: str) -> None:
        # The console moves the bars down itself. A stop and restart of the bars would erase the lines above.
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
        self._file.close()


def _is_one_terminal(descriptor: int, other: int) -> bool:
    return os.isatty(descriptor) and os.isatty(other) and os.fstat(descriptor).st_rdev == os.fstat(other).st_rdev
