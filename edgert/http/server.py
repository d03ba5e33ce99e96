"""Accepts HTTP connections, a thread each, and bounds how many there are.

Blocking threads rather than an event loop for the reason of the local socket: the answer itself comes from a
blocking call, and to hand it between a loop and a pool costs more than all of HTTP
(docs/decisions/0005-http-on-blocking-threads.md).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

from edgert.http.connection import Handler, HttpConnection
from edgert.http.limits import BODIES_MAX, EVICT_IDLE_S, STOP_S_MAX, BodyBudget, Limits
from edgert.http.messages import HttpError
from edgert.threads import STACK_BYTES

PAUSE_S = 0.05  # where the process is out of descriptors or threads


class HttpServer:
    """Serves `listener` with `handle` until SIGTERM, SIGINT, or the end of the process that started it."""

    def __init__(self, listener: socket.socket, handle: Handler, limits: Limits) -> None:
        self._listener, self._handle, self._limits = listener, handle, limits
        self._budget = BodyBudget(BODIES_MAX * limits.body_bytes_max)
        self._lock = threading.Lock()
        self._connections: set[HttpConnection] = set()
        self._stopped = False

    def run(self) -> None:
        """Serve; afterwards every request under way has been answered, or has had STOP_S_MAX."""
        threading.stack_size(STACK_BYTES)
        with selectors.DefaultSelector() as selector, _stop_signals() as signals:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(signals, selectors.EVENT_READ, self._stop)
            if _is_pipe(sys.stdin.fileno()):  # whoever started us holds the other end, and alone
                selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._stop)
            while not self._stopped:
                for key, _ in selector.select():
                    key.data()
        self._listener.close()
        self._drain()

    def _stop(self) -> None:
        self._stopped = True

    def _drain(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close_when_idle()
        until_s = time.monotonic() + STOP_S_MAX
        while self._connections and time.monotonic() < until_s:
            time.sleep(0.005)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: some will be closed
            time.sleep(PAUSE_S)
            return
        sock.setblocking(True)
        with self._lock:
            if len(self._connections) >= self._limits.connections_max:
                self._evict()
                full = len(self._connections) >= self._limits.connections_max
            else:
                full = False
        if full:
            _refuse(sock, self._limits.connections_max)
            return
        connection = HttpConnection(sock, self._handle, self._limits, self._budget)
        with self._lock:
            self._connections.add(connection)
        try:
            threading.Thread(target=self._serve, args=(sock, connection), daemon=True).start()
        except RuntimeError:  # no more threads
            with self._lock:
                self._connections.discard(connection)
            sock.close()
            time.sleep(PAUSE_S)

    def _evict(self) -> None:
        """The connection that has been idle longest gives way; its client will make a new one."""
        now_s = time.monotonic()
        idle = [(c.idle_since_s, c) for c in self._connections if c.idle_since_s is not None]
        since_s, connection = min(idle, key=lambda pair: pair[0], default=(now_s, None))
        if connection is not None and now_s - since_s > EVICT_IDLE_S:
            connection.close_when_idle()
            self._connections.discard(connection)

    def _serve(self, sock: socket.socket, connection: HttpConnection) -> None:
        try:
            connection.serve()
        except OSError:
            pass  # the client is gone
        except Exception as error:  # noqa: BLE001  # one connection must not take the others along
            print(f"http: {type(error).__name__} in a connection: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                _say(sock, HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}"))
        finally:
            with self._lock:
                self._connections.discard(connection)
            sock.close()


def _refuse(sock: socket.socket, connections_max: int) -> None:
    with contextlib.suppress(OSError):
        _say(
            sock,
            HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{connections_max} clients are connected, the limit ([http] connections_max)",
                retry_after_s=1.0,
            ),
        )
    sock.close()


def _say(sock: socket.socket, error: HttpError) -> None:
    """A last word that nothing waits for."""
    response = error.response()
    body = b"".join(response.parts)
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: {response.content_type}\r\n"
    fields = "".join(f"{name}: {value}\r\n" for name, value in response.headers)
    end = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    sock.send((head + fields + end).encode() + body, socket.MSG_DONTWAIT)
    sock.shutdown(socket.SHUT_WR)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """A socket that becomes readable when a signal asks the process to end."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(-1)
