"""Accepts HTTP connections, each with its own thread, and limits how many there are.

It uses blocking threads instead of an event loop because the answer comes from a blocking call: to hand it between a
loop and a pool costs more than all of HTTP (docs/decisions/0005-http-on-blocking-threads.md).
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
from edgert.log import log
from edgert.threads import STACK_BYTES

PAUSE_S = 0.05  # when the process is out of descriptors or threads


class HttpServer:
    """Serves `listener` with `handle` until SIGTERM, SIGINT, or the end of the process that started it."""

    def __init__(self, listener: socket.socket, handle: Handler, limits: Limits) -> None:
        self._listener, self._handle, self._limits = listener, handle, limits
        self._budget = BodyBudget(BODIES_MAX * limits.body_bytes_max)
        self._lock = threading.Lock()
        self._connections: set[HttpConnection] = set()
        self._stopped = False

    def run(self) -> None:
        """Serve until told to stop; then wait up to STOP_S_MAX for the requests under way."""
        threading.stack_size(STACK_BYTES)
        with selectors.DefaultSelector() as selector, _stop_signals() as signals:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(signals, selectors.EVENT_READ, self._stop)
            if _is_pipe(sys.stdin.fileno()):  # the process that started this one holds the other end
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
        except OSError:  # out of descriptors until some are closed
            time.sleep(PAUSE_S)
            return
        sock.setblocking(True)
        connection = HttpConnection(sock, self._handle, self._limits, self._budget)
        if not self._admit(connection):
            message = f"{self._limits.connections_max} clients are connected, the limit ([http] connections_max)"
            _answer_and_close(sock, HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_after_s=1.0))
            return
        try:
            threading.Thread(target=self._serve, args=(sock, connection), daemon=True).start()
        except RuntimeError:  # no more threads
            with self._lock:
                self._connections.discard(connection)
            sock.close()
            time.sleep(PAUSE_S)

    def _admit(self, connection: HttpConnection) -> bool:
        with self._lock:
            if len(self._connections) >= self._limits.connections_max:
                self._evict()
            if len(self._connections) >= self._limits.connections_max:
                return False
            self._connections.add(connection)
            return True

    def _evict(self) -> None:
        """Close the connection that has been idle longest; its client will make a new one."""
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
        except Exception as error:  # noqa: BLE001  # an error in one connection must not end the others
            log(f"http: {type(error).__name__} in a connection: {error}")
            _answer_and_close(
                sock, HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")
            )
        finally:
            with self._lock:
                self._connections.discard(connection)
            sock.close()


def _answer_and_close(sock: socket.socket, error: HttpError) -> None:
    """Send the error without waiting for the client, and close the connection."""
    response = error.response()
    with contextlib.suppress(OSError):
        sock.send(b"".join((response.head(keep_alive=False), *response.parts)), socket.MSG_DONTWAIT)
        sock.shutdown(socket.SHUT_WR)
    sock.close()


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when a signal asks the process to end."""
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
