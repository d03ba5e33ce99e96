"""Accepts HTTP connections, each with its own thread, and limits their number.

The server uses blocking threads instead of an event loop, because a blocking call computes the answer. Passing the
answer from a thread pool to an event loop would take more time than all HTTP code of a request
(docs/decisions/0005-http-on-blocking-threads.md).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from edgert.http.admission import Admission, Place, address_of, busy
from edgert.http.connection import Handler, HttpConnection
from edgert.http.limits import STOP_S_MAX, Limits
from edgert.http.messages import HttpError
from edgert.log import log

STOP_POLL_S = 0.005  # the time between two checks whether all connections have ended
PAUSE_S = 0.05  # the pause if the process is out of descriptors or threads


class Readable(Protocol):
    def fileno(self) -> int: ...


class HttpServer:
    """Answers the requests of all connections to `listener`, a non-blocking socket, with `handle`."""

    def __init__(
        self, listener: socket.socket, handle: Handler, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listener = listener
        self._handle = handle
        self._limits = limits
        self._clock = clock
        self._admission = Admission(limits, clock)

    def run(self, stop: Readable, release_memory: Callable[[], bool] = lambda: True) -> None:
        """Serve until `stop` can be read; then wait up to STOP_S_MAX for the requests in progress.

        After the first client, call `release_memory` every `release_after_s`, until `release_memory` returns True and
        no client is left.
        """
        due_s: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(stop, selectors.EVENT_READ)
            while True:
                wait_s = None if due_s is None else max(0.0, due_s - self._clock())
                ready = [key.fileobj for key, _ in selector.select(wait_s)]
                if stop in ready:
                    break
                if ready:
                    self._accept()
                    due_s = due_s or self._clock() + self._limits.release_after_s
                if due_s is not None and self._clock() >= due_s:
                    ended = release_memory() and self._admission.is_empty
                    due_s = None if ended else self._clock() + self._limits.release_after_s
        self._listener.close()
        self._admission.end_all()
        until_s = time.monotonic() + STOP_S_MAX
        while not self._admission.is_empty and time.monotonic() < until_s:
            time.sleep(STOP_POLL_S)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the process is out of descriptors until some connections close
            time.sleep(PAUSE_S)
            return
        sock.setblocking(True)
        place = Place(sock, address_of(peer), self._clock())
        refusal = None
        if not self._admission.admit(place):
            refusal = busy(f"{self._limits.connections_max} clients are connected, the limit")
            if not self._admission.admit_to_leave(place):
                _answer_and_close(sock, refusal)
                return
        try:
            threading.Thread(target=self._serve, args=(sock, place, refusal), daemon=True).start()
        except RuntimeError:  # the limit of threads is reached
            self._admission.leave(place)
            sock.close()
            time.sleep(PAUSE_S)

    def _serve(self, sock: socket.socket, place: Place, refusal: HttpError | None) -> None:
        try:
            connection = HttpConnection(sock, self._handle, self._limits, self._admission, place, self._clock)
            connection.serve() if refusal is None else connection.refuse(refusal)
        except OSError:
            pass  # the client has gone
        except Exception as error:  # noqa: BLE001  # an error in one connection must not end the others
            log(f"http: {type(error).__name__} in a connection: {error}")
            _answer_and_close(
                sock, HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")
            )
        finally:
            self._admission.leave(place)
            sock.close()


def _answer_and_close(sock: socket.socket, error: HttpError) -> None:
    """Send the error without waiting for the client, and close the connection."""
    response = error.response()
    with contextlib.suppress(OSError):
        sock.send(b"".join((response.head(keep_alive=False), *response.parts)), socket.MSG_DONTWAIT)
        sock.shutdown(socket.SHUT_WR)
    sock.close()
