"""The progress of an upload to a registry, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from edgert.cli.output import progress
from edgert_deploy.common.quantities import size_text

SMALL_BYTES_MAX = 10_000_000


@contextmanager
def upload_progress(where: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows (sent, total) bytes: a bar on a terminal, else a line after each tenth.

    Without a terminal, a small upload has only one line.
    """
    console, tenths = Console(stderr=True), 0

    def lines(sent: int, total: int) -> None:
        nonlocal tenths
        if (now := 10 * sent // max(total, 1)) > tenths and (total > SMALL_BYTES_MAX or sent >= total):
            tenths = now
            progress(f"sending to {where}: {10 * tenths} % of {size_text(total)}")

    if not console.is_terminal:
        yield lines
        return
    shown = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    with Progress(text, *shown, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("sending", total=None)
        yield lambda sent, total: bar.update(task, completed=sent, total=total)
