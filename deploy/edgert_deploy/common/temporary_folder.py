"""Temporary folders for large files, which the next command removes if a command was killed.

A command holds the lock of a file in its folder. After SIGKILL the folder stays, but the lock is free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from edgert.durable import is_locked, locked

PREFIX, LOCK = "edgert-", ".lock"


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a temporary folder whose name contains `purpose`. Remove the folder afterwards."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{purpose}-") as name, _locked(Path(name)):
        yield Path(name)


def _locked(folder: Path) -> FileIO:
    """Lock the folder.

    The lock file gets its name after it is locked, because other commands remove folders with an unlocked lock file.
    """
    lock = locked(folder / f"{LOCK}.new")
    (folder / f"{LOCK}.new").rename(folder / LOCK)
    return lock


def _remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders of killed commands."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # the folder's command has just removed it
            lock = (folder / LOCK).lstat()
            if lock.st_uid == os.geteuid() and not is_locked(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)
