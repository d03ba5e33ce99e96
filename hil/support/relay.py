"""A TCP relay that cuts, freezes or slows a link in the middle of a transfer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class Relay:
    """A relay to a port that cuts or freezes each connection after a number of bytes towards the server.

    `bytes_per_s` limits the rate in that direction, `cut_answers_after` cuts in the other one, and `before_cut` is
    called before a cut of the first kind. The relay listens on `address` at `port` (0: a free one).
    """

    def __init__(
        self,
        target_port: int,
        cut_after: list[int] | None = None,
        freeze_after: int | None = None,
        bytes_per_s: float | None = None,
        port: int = 0,
        cut_answers_after: list[int] | None = None,
        address: str = "127.0.0.1",
        before_cut: Callable[[], object] = lambda: None,
    ) -> None:
        self._target_port = target_port
        self._bytes_per_s = bytes_per_s
        self._cut_after = list(cut_after or [])  # one entry per connection, then no more cuts
        self._cut_answers_after = list(cut_answers_after or [])  # likewise
        self._freeze_after, self._before_cut = freeze_after, before_cut
        self._listener = socket.create_server((address, port))
        self._sockets: list[socket.socket] = [self._listener]
        self.connections = 0
        self.port = int(self._listener.getsockname()[1])
        self.bytes_passed = 0
        self.bytes_towards_server = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            limit = self._cut_after.pop(0) if self._cut_after else None
            back = self._cut_answers_after.pop(0) if self._cut_answers_after else None
            threading.Thread(
                target=self._pass, args=(client, server, limit, self._freeze_after, True), daemon=True
            ).start()
            threading.Thread(target=self._pass, args=(server, client, back, None, False), daemon=True).start()

    def _pass(
        self, source: socket.socket, target: socket.socket, cut: int | None, freeze: int | None, slow: bool
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                if freeze is not None and passed > freeze:
                    return  # reads nothing and closes nothing: the link is dead without a notice
                if cut is not None and passed + len(data) > cut:
                    target.sendall(data[: cut - passed])
                    self.bytes_passed += cut - passed
                    if slow:
                        self.bytes_towards_server += cut - passed
                        self._before_cut()
                    break
                target.sendall(data)
                passed += len(data)
                self.bytes_passed += len(data)
                self.bytes_towards_server += len(data) if slow else 0
                if slow and self._bytes_per_s is not None:
                    time.sleep(len(data) / self._bytes_per_s)
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
