"""The temporary folder of a build: errors about a full disk name this folder.

Every temporary file of a build, its tools and its children is in this folder. After SIGKILL the folder stays, and the
next command removes it (common/temporary_folder.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgert.errors import BuildFailed, EdgeRTError
from edgert_deploy.common.quantities import size_text
from edgert_deploy.common.temporary_folder import temporary_folder

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
    with temporary_folder("build") as folder:
        if (left := free(folder)) < needed:
            raise _too_small(folder, left, needed)
        try:
            with _temporary_files_in(folder):
                yield folder
        except (OSError, EdgeRTError) as error:
            if _is_full(error) and (left := free(folder)) < needed:
                raise _too_small(folder, left, needed) from error
            raise


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
