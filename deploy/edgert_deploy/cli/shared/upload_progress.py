"""How an upload to a registry goes, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from edgert_deploy.cli.shared.output import say
from edgert_deploy.common.quantities import size_text


class UploadProgress:
    """Shows `progress(sent, total)` in a `with` block: a bar on a terminal, else a line each tenth."""

    def __init__(self, where: str) -> None:
        self._where, self._tenths = where, 0
        console = Console(stderr=True)
        self._bar = _bar(console) if console.is_terminal else None

    def __enter__(self) -> UploadProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("sending", total=None)
        return self

    def __call__(self, sent: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=sent, total=total)
        elif (tenths := 10 * sent // max(total, 1)) > self._tenths:
            self._tenths = tenths
            say("", f"sending to {self._where}: {10 * tenths} % of {size_text(total)}")

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Progress:
    shown = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *shown, console=console, transient=True, redirect_stdout=False)
