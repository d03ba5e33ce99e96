"""A disk that loses unflushed writes in part when its power is cut, like a real disk with a cache.

It speaks NBD (the NBD project's doc/proto.md) on a Unix socket, which qemu uses as a disk. All content is in memory. A
write is acknowledged at once and kept apart; a flush makes all earlier writes last. `cut` keeps everything that was
flushed. Of the rest it keeps or drops each sector by chance, so neither order nor whole writes survive.

One unit stays whole: the superblock of an ext4, two such sectors with one checksum. If only half of it is written, ext4
does not mount and `e2fsck -p` fails, because ext4 expects a disk to write both together, as flash with its pages does.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from pathlib import Path

SECTOR_BYTES = 512  # a disk writes it whole or not at all
SUPERBLOCK_AT = 1024
_MAGIC, _OPTION_MAGIC = 0x4E42444D41474943, 0x49484156454F5054
_REPLY_MAGIC, _REQUEST_MAGIC, _ANSWER_MAGIC = 0x3E889045565A9, 0x25609513, 0x67446698
_EXPORT_NAME, _ABORT, _GO = 1, 2, 7
_ACK, _INFO, _UNSUPPORTED = 1, 3, 0x80000001
_READ, _WRITE, _CLOSE, _FLUSH, _TRIM = 0, 1, 2, 3, 4
_FLAGS = 1 | 4  # has flags, takes flushes
_EINVAL = 22


class LossyDisk:
    """A disk with `content` at the start.

    `requests` counts writes and flushes. The power is cut before request number `strike_at`; then `struck` is set.
    Later writes are answered and lost.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._kept, self._seen = bytearray(content), bytearray(content)
        self._pending: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self.requests = 0
        self.strike_at: int | None = None
        self.struck = threading.Event()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"nbd+unix:///?socket={self.path}"

    def cut(self, chance: random.Random) -> int:
        """Cut and restore the power; return how many sectors were lost: unflushed ones survive by chance."""
        with self._lock:
            share, lost = chance.choice((0.0, 0.5, 0.9, 1.0)), 0
            for at, data in self._pending:
                for offset in range(0, len(data), SECTOR_BYTES):
                    sector = data[offset : offset + SECTOR_BYTES]
                    if offset == 0 or at + offset != SUPERBLOCK_AT + SECTOR_BYTES:
                        kept = chance.random() < share
                    if kept:
                        self._kept[at + offset : at + offset + len(sector)] = sector
                    else:
                        lost += 1
            self._pending.clear()
            self._seen[:] = self._kept
            self.strike_at = None
            self.struck.clear()
            return lost

    @property
    def content(self) -> bytes:
        """Return the content of the disk after a cut."""
        return bytes(self._kept)

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), link:
            if self._shake_hands(link):
                while self._answer(link):
                    pass

    def _shake_hands(self, link: socket.socket) -> bool:
        """Negotiate the one export; return whether the client stays."""
        link.sendall(struct.pack(">QQH", _MAGIC, _OPTION_MAGIC, 3))  # fixed newstyle, no padding
        _exactly(link, 4)
        export = struct.pack(">QH", len(self._seen), _FLAGS)
        while True:
            _, option, size = struct.unpack(">QII", _exactly(link, 16))
            _exactly(link, size)
            if option == _EXPORT_NAME:
                link.sendall(export)
                return True
            if option == _GO:
                link.sendall(_option_reply(option, _INFO, struct.pack(">H", 0) + export) + _option_reply(option, _ACK))
                return True
            if option == _ABORT:
                return False
            link.sendall(_option_reply(option, _UNSUPPORTED))

    def _answer(self, link: socket.socket) -> bool:
        _, _, kind, handle, at, size = struct.unpack(">IHHQQI", _exactly(link, 28))
        if kind == _CLOSE:
            return False
        data = _exactly(link, size) if kind == _WRITE else b""
        error, answer = 0, b""
        with self._lock:
            if kind in (_WRITE, _FLUSH):
                if self.strike_at is not None and self.requests >= self.strike_at:
                    self.struck.set()
                self.requests += 1
            if self.struck.is_set() and kind != _READ:
                pass  # the power is gone: ignore the request without an answer
            elif kind == _READ:
                answer = bytes(self._seen[at : at + size])
            elif kind == _WRITE:
                self._seen[at : at + size] = data
                self._pending.append((at, data))
            elif kind == _FLUSH:
                for offset, written in self._pending:
                    self._kept[offset : offset + len(written)] = written
                self._pending.clear()
            elif kind != _TRIM:
                error = _EINVAL
        link.sendall(struct.pack(">IIQ", _ANSWER_MAGIC, error, handle) + answer)
        return True


def _option_reply(option: int, kind: int, data: bytes = b"") -> bytes:
    return struct.pack(">QIII", _REPLY_MAGIC, option, kind, len(data)) + data


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
