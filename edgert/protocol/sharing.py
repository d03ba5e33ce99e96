"""Memory that an app and the daemon share, for the bodies of large frames.

The daemon creates the memory, seals the size, and passes the descriptor with the WELCOME; a client cannot choose the
memory. The client writes the first half (requests), the daemon the second half (responses). Each end copies a frame out
of the other end's half, and only then reads the content. The body of a frame starts at offset 64 of a half, after space
for a header.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
from dataclasses import dataclass

SHARE_BYTES_MIN = 16 * 1024  # smaller frames cost less through the socket
HALF_BYTES_MAX = 16 * 1024**2
DESCRIPTOR_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, eq=False)
class SharedArea:
    """One connection's shared memory. Pages cost nothing until they are first written."""

    request: memoryview
    response: memoryview

    @property
    def size_bytes(self) -> int:
        return len(self.request) + len(self.response)

    @staticmethod
    def bytes_for(half_bytes: int) -> int:
        """Return an area's size: each half has `half_bytes` in whole pages, at most HALF_BYTES_MAX."""
        return 2 * mmap.PAGESIZE * -(-min(half_bytes, HALF_BYTES_MAX) // mmap.PAGESIZE)

    @classmethod
    def create(cls, half_bytes: int) -> tuple[SharedArea, int] | None:
        """Return a new area of `bytes_for(half_bytes)`, and its descriptor; None if the system refuses it."""
        size_bytes = cls.bytes_for(half_bytes)
        try:
            descriptor = os.memfd_create("edgert", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError):
            return None
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls._mapped(descriptor, size_bytes // 2), descriptor
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, descriptor: int) -> SharedArea | None:
        """Map the area of a received descriptor and close the descriptor. None if the size could change."""
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                return None
            return cls._mapped(descriptor, os.fstat(descriptor).st_size // 2)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)

    def free_pages(self) -> None:
        """Return the memory to the kernel, even if a client still has the descriptor: the client reads zeros."""
        pages: mmap.mmap = self.request.obj  # type: ignore[assignment]  # made by _mapped
        with contextlib.suppress(OSError):  # not supported: the pages stay until the client closes its descriptor
            pages.madvise(mmap.MADV_REMOVE)

    @classmethod
    def _mapped(cls, descriptor: int, half: int) -> SharedArea:
        view = memoryview(mmap.mmap(descriptor, 2 * half))
        return cls(view[:half], view[half:])


def send_with_descriptor(sock: socket.socket, data: bytes, descriptor: int) -> None:
    """Send `data` with a descriptor attached to its first byte."""
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    sent = sock.sendmsg([data], attached)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive_with_descriptor(sock: socket.socket, room: memoryview) -> tuple[int, int | None]:
    """Receive into `room`; return the number of bytes and the first descriptor, and close all others."""
    count, attached, _, _ = sock.recvmsg_into([room], DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC)
    descriptors = descriptors_in(attached)
    for extra in descriptors[1:]:
        with contextlib.suppress(OSError):
            os.close(extra)
    return count, descriptors[0] if descriptors else None


def descriptors_in(attached: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in the ancillary data of a message."""
    descriptors = array.array("i")
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return list(descriptors)
