"""What makes a change on disk survive a power cut: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, data: bytes, *, mode: int | None = None, shared: bool = False) -> None:
    """Let `path` hold `data`, at once or not at all, and for good. See `replacing`."""
    with replacing(path, mode=mode, shared=shared) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, mode: int | None = None, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends, and goes where it ends in an error.

    It lies beside `path` under one name, so that what a power cut leaves of it is taken by the next; with `shared`, where
    no lock keeps several processes from writing at once, under a name of this process's own. Raises OSError.
    """
    own = f".{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{own}.new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC  # no link that another put there
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            sync_file(file)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Make what was written to it last."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames and creations in `path` last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(path: Path) -> None:
    """The same for `path` and every folder below it."""
    for parent, _, _ in os.walk(path):
        sync_folder(Path(parent))
