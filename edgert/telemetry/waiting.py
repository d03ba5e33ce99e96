"""What a process sleeps on that has nothing to do until somebody wants something: a word to stop, a changed file."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100  # inotify(7)
_EVENTS_BYTES = 65536


class Stop:
    """The word to stop, given once and for ever. `select` finds it readable from then on."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._said = False

    def set(self) -> None:
        """Say it. Any thread may."""
        self._said = True
        os.write(self._writer, b"x")

    def is_set(self) -> bool:
        return self._said

    def fileno(self) -> int:
        return self._reader


class FolderWatch:
    """Wakes who waits when a file in `folder` is written to, by whichever process.

    `descriptors` is empty where the kernel gives no inotify, or no more of it: then nothing wakes anybody, and the
    one who waits must look by himself now and then.
    """

    def __init__(self, folder: Path) -> None:
        self.descriptors: tuple[int, ...] = ()
        with contextlib.suppress(AttributeError, OSError):
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor < 0:
                return
            if libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
                os.close(descriptor)
                return
            self.descriptors = (descriptor,)

    def forget(self) -> None:
        """What was written until now wakes nobody any more."""
        for descriptor in self.descriptors:
            with contextlib.suppress(BlockingIOError):
                while os.read(descriptor, _EVENTS_BYTES):
                    pass

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
