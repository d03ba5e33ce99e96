"""The temporary folder of a build: errors about a full disk name this folder.

Every temporary file of a build, its tools and its children is in this folder. A build holds the lock of a file in the
folder. After SIGKILL the folder stays, but the lock is free. So the next build removes the folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from edgert.durable import is_locked, locked
from edgert.errors import BuildFailed, EdgeRTError
from edgert_deploy.common.quantities import size_text

PREFIX, LOCK = "edgert-build-", "lock"
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left on device", "Disk quota exceeded")  # parts of messages of vendors' tools


def free_bytes(folder: Path) -> int:
    """Return how many bytes the user may still write to the disk of `folder`."""
    return shutil.disk_usage(folder).free


@contextmanager
def work_folder(needed: int = 0, free: Callable[[Path], int] = free_bytes) -> Iterator[Path]:
    """Yield a temporary folder. Remove the folder afterwards.

    While the folder exists, this process and its child processes write all temporary files into it. Raises BuildFailed
    if the disk of the folder has less than `needed` bytes free, or becomes full.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, _locked(folder := Path(name)):
        if (left := free(folder)) < needed:
            raise _too_small(folder, left, needed)
        try:
            with _temporary_files_in(folder):
                yield folder
        except (OSError, EdgeRTError) as error:
            if _is_full(error) and (left := free(folder)) < needed:
                raise _too_small(folder, left, needed) from error
            raise


def _locked(folder: Path) -> FileIO:
    """Lock the build's folder.

    The lock file gets its name after it is locked, because other builds remove folders with an unlocked lock file.
    """
    lock = locked(folder / f"{LOCK}.new")
    (folder / f"{LOCK}.new").rename(folder / LOCK)
    return lock


def _remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders of killed builds."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # the folder's build has just removed it
            lock = (folder / LOCK).lstat()
            if lock.st_uid == os.geteuid() and not is_locked(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def _is_full(error: OSError | EdgeRTError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(text in error.message for text in FULL_TEXTS)


def _too_small(folder: Path, left: int, needed: int) -> BuildFailed:
    return BuildFailed(
        f"the folder for temporary files, {folder.parent}, has {size_text(left)} free, and this build needs about "
        f"{size_text(needed)}: free some space, or set TMPDIR=/folder/on/a/larger/disk"
    )
