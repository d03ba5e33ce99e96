"""Files that processes share: replaced whole or not at all, and locked against each other.

A durable change survives a power cut: write a new file beside the old file, fsync, rename, fsync the folder. File modes
do not depend on the umask. A process with read access can lock a file, so only the owner may read a lock file. Every
wait has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from edgert.errors import EdgeRTError, StorageFailed
from edgert.printable import reason_of

LOCK_RETRY_S = 0.02
LOCK_S_MAX = 10.0
PRIVATE = 0o600
PRIVATE_FOLDER = 0o700


@contextmanager
def os_error_as(
    kind: type[EdgeRTError], what: str, advice: str = "", busy: EdgeRTError | None = None
) -> Iterator[None]:
    """Turn an OSError of the block into a `kind` that names `what`, the reason and the next step.

    `what` is a text such as "cannot read X". Without `advice`, the next step is the usual one for the reason. If
    another process holds a lock, raise `busy` instead, if it is given.
    """
    try:
        yield
    except OSError as error:
        if busy is not None and isinstance(error, BlockingIOError):
            raise busy from error
        reason = f"{error.strerror or error}; {advice}" if advice else reason_of(error)
        raise kind(f"{what}: {reason}") from error


def storing(what: str, busy: EdgeRTError | None = None) -> AbstractContextManager[None]:
    return os_error_as(StorageFailed, what, busy=busy)


def store_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, durably. Raises StorageFailed."""
    with storing(f"cannot write {path}"):
        replace_file(path, data)


def replace_file(path: Path, data: bytes, *, durable: bool = True, mode: int = PRIVATE, shared: bool = False) -> None:
    """Replace the content of `path` by `data`, whole or not at all. See `replacing`."""
    with replacing(path, durable=durable, mode=mode, shared=shared) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = PRIVATE, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a new file, which replaces `path` when the block ends without an error.

    The new file is in the folder of `path` and has a fixed name. So after a power cut, the next writer reuses the
    unfinished file. Raises OSError. If the change need not be `durable`, a power cut may damage the file. Several
    processes may write a `shared` file at once, without a lock: the name of the new file then contains the process id.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a file", os.fspath(path))
    suffix = f".{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{suffix}.new")
    try:
        # O_NOFOLLOW: follow no link of another user
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, PRIVATE), "wb") as file:
            os.fchmod(file.fileno(), mode)
            yield file
            if durable:
                sync_file(file)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def check_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise StorageFailed if the disk of `folder` has less free space than `what` needs."""
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < needed_bytes:
        raise StorageFailed(
            f"{what} needs {needed_bytes // 10**6 + 1} MB in {folder}, but {free_bytes // 10**6} MB are free: "
            "free some space there, then try again"
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1024**2):
            digest.update(chunk)
    return digest.hexdigest()


def sync_file(file: BinaryIO) -> None:
    """Make the content of `file` durable on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in the folder `path` (renames, creations) durable on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(path: Path) -> None:
    """Make the names in `path` and in every folder below it durable on the disk."""
    for parent, _, _ in os.walk(path):
        sync_folder(Path(parent))


def make_private(folder: Path) -> None:
    """Create `folder` and its missing parents; only its owner may enter it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    status = folder.stat()
    if stat.S_IMODE(status.st_mode) != PRIVATE_FOLDER and status.st_uid == os.geteuid():
        folder.chmod(PRIVATE_FOLDER)


def only_owner_writes(path: Path) -> None:
    """Remove the write access of everybody but the owner of `path`. Raises OSError."""
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022 and status.st_uid == os.geteuid():
        path.chmod(mode & ~0o022)


def locked(path: Path, wait_s: float = LOCK_S_MAX) -> FileIO:
    """Lock the file `path` against every other process. Return the open file; a close unlocks the file.

    The function creates a missing file. The kernel unlocks the file when the process dies. Raises OSError; also
    BlockingIOError if another process holds the lock for `wait_s`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = FileIO(os.open(path, flags, PRIVATE), "r+b")
    gives_up_at = time.monotonic() + wait_s
    try:
        status = os.fstat(file.fileno())
        if stat.S_IMODE(status.st_mode) != PRIVATE and status.st_uid == os.geteuid():
            os.fchmod(file.fileno(), PRIVATE)
        while not _try_lock(file, path, fcntl.LOCK_EX):
            if time.monotonic() >= gives_up_at:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", os.fspath(path))
            time.sleep(LOCK_RETRY_S)
    except BaseException:
        file.close()
        raise
    return file


def is_locked(path: Path) -> bool:
    """Return whether a process has locked the file `path`; do not create the file. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        return not _try_lock(file, path, fcntl.LOCK_SH)


def _try_lock(file: FileIO | BinaryIO, path: Path, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        reason = "this file system cannot lock files; use a folder on a local disk"
        raise OSError(error.errno, reason, os.fspath(path)) from error
    return True
