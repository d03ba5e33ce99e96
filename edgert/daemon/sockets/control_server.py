"""The control server: receives `edgertd`'s commands, one JSON line per connection, with a deadline."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgert.errors import DeviceError, EdgeRTError, ProtocolError
from edgert.printable import file_error
from edgert.protocol.control import LINE_BYTES_MAX, error_answer

CONTROL_S_MAX = 5.0  # the longest time from the connection to the complete request
ACCEPT_PAUSE_S = 0.05  # the pause if the process is out of descriptors or memory


@dataclass(eq=False)
class ControlClient:
    """A command's connection."""

    sock: socket.socket
    until_s: float
    data: bytearray = field(default_factory=bytearray)

    def reply(self, value: dict[str, Any]) -> None:
        """Send the answer and close the connection."""
        with contextlib.suppress(OSError):  # the command has ended
            self.sock.settimeout(1.0)
            self.sock.sendall(json.dumps(value).encode() + b"\n")
        self.sock.close()


class ControlServer:
    """Passes each request to `handle`, which replies now or later, on the supervisor's thread."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Callable[[ControlClient, dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._selector = selector
        self._handle = handle
        self._clock = clock
        self._waiting: set[ControlClient] = set()

    def accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # the process is out of descriptors or memory: the queue waits
            time.sleep(ACCEPT_PAUSE_S)
            return
        sock.setblocking(False)
        client = ControlClient(sock, self._clock() + CONTROL_S_MAX)
        self._waiting.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))

    def tick(self) -> None:
        """Drop connections whose deadline has passed."""
        now_s = self._clock()
        for client in [c for c in self._waiting if now_s > c.until_s]:
            self._remove(client)
            client.sock.close()

    def due_s(self) -> float | None:
        return min((client.until_s for client in self._waiting), default=None)

    def _read(self, client: ControlClient) -> None:
        try:
            data = client.sock.recv(LINE_BYTES_MAX)
        except OSError:
            data = b""
        client.data += data
        if data and not client.data.endswith(b"\n") and len(client.data) < LINE_BYTES_MAX:
            return
        self._remove(client)
        if not data:
            client.sock.close()
            return
        try:
            self._handle(client, json.loads(client.data))
        except EdgeRTError as error:
            client.reply(error_answer(error))
        except OSError as error:  # the process is out of descriptors, or the disk is faulty
            client.reply(error_answer(DeviceError(f"{file_error(error)}; try again")))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            client.reply(error_answer(ProtocolError(f"not a control request: {type(error).__name__}")))

    def _remove(self, client: ControlClient) -> None:
        self._waiting.discard(client)
        self._selector.unregister(client.sock)
