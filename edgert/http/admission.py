"""Selects the connections to end when all places are taken, or when bodies fill the memory for bodies.

Theory of operation: a connection waits for its client while the client must send a request or the rest of a request, or
must read an answer. A connection does not wait while its request is handled. From `due_s` on, the client is late. A
client whose body or answer moves at BODY_BYTES_PER_S_MIN is never late, and faster bytes allow a pause of at most
STILL_S_MAX. If all places are taken, a new connection takes the place of a late client. The server first selects the
address with the most places, and then the client at this address that is late for longest. Earlier answers give a
client no advantage, because an attacker also gets answers. So slow heads and bodies of an attacker end before a good
request, even if the attacker sends many. The server counts only received bytes as memory, never the length that a
request states.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from edgert.http.limits import BODY_BYTES_PER_S_MIN, STILL_S_MAX, STOP_LINGER_S, Limits
from edgert.http.messages import HttpError

# The reasons why a connection must end before its request is complete.
EVICTED = "the request arrived too slowly, so another client got this connection"
STOPPING = "the server is stopping"


class Place:
    """One connection. From `due_s` on, its client is late; `due_s` is None while a request is handled."""

    def __init__(self, sock: socket.socket, address: bytes | str, now_s: float) -> None:
        self.address = address
        self.due_s: float | None = now_s
        self.end_reason = ""  # the reason why the connection must end; "" while it may continue
        self.was_answered = False
        self.is_sending = False
        self.body_bytes = 0
        self._sock = sock

    def note_progress(self, size_bytes: int, now_s: float) -> None:
        """Note that bytes of a body or an answer were transferred."""
        due_s = now_s if self.due_s is None else self.due_s
        self.due_s = min(due_s + size_bytes / BODY_BYTES_PER_S_MIN, now_s + STILL_S_MAX)

    def end(self, reason: str) -> None:
        """Accept no further bytes from the client; end an answer that the client reads too slowly."""
        self.end_reason = reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR if self.is_sending else socket.SHUT_RD)


class Admission:
    """The places and the memory of one server. Any thread may call every method."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._places: set[Place] = set()
        self._leaving: set[Place] = set()
        self._body_bytes = 0
        self._close_at_s = float("inf")

    def admit(self, place: Place) -> bool:
        """Admit a new connection with `place`; return False if all places are taken and no client is late."""
        with self._lock:
            full = len(self._places) >= self._limits.connections_max
            if full and (len(self._leaving) >= self._limits.connections_max or not self._evict(place)):
                return False
            self._places.add(place)
            return True

    def admit_to_leave(self, place: Place) -> bool:
        """Let a refused connection stay until its client has read why; return False if there are too many."""
        with self._lock:
            if self.closes_at_once:
                return False
            self._leaving.add(place)
            return True

    def leave(self, place: Place) -> None:
        self.release_bytes(place)
        with self._lock:
            self._places.discard(place)
            self._leaving.discard(place)

    def end_all(self) -> None:
        """Let each connection end after its current request, because the server stops."""
        with self._lock:
            self._close_at_s = self._clock() + STOP_LINGER_S
            for place in self._places:
                place.end(STOPPING)

    @property
    def is_empty(self) -> bool:
        return not self._places and not self._leaving

    @property
    def closes_at_once(self) -> bool:
        """Whether ended connections must close at once, before their clients have read why.

        New clients may soon find no place, or the server stops.
        """
        return len(self._leaving) > self._limits.connections_max // 2 or self._clock() >= self._close_at_s

    def add_bytes(self, place: Place, size_bytes: int) -> None:
        """Count a body's bytes. Raises HttpError (503) if memory is short and no other client is late."""
        with self._lock:
            while self._body_bytes + size_bytes > self._limits.bodies_bytes_max:
                if not self._evict(place, only_with_bytes=True):
                    raise busy(f"the bodies in progress ({self._body_bytes} bytes) fill the memory for bodies")
            self._body_bytes += size_bytes
            place.body_bytes += size_bytes

    def release_bytes(self, place: Place) -> None:
        """Subtract the bytes of an answered request."""
        with self._lock:
            self._body_bytes -= place.body_bytes
            place.body_bytes = 0

    def _evict(self, newcomer: Place, *, only_with_bytes: bool = False) -> bool:
        """End the connection whose place `newcomer` may take; return False if no client is late."""
        now_s = self._clock()
        by_address = Counter(place.address for place in self._places if place is not newcomer)
        late = [
            (by_address[place.address], now_s - due_s, place)
            for place in self._places
            if place is not newcomer
            and (due_s := place.due_s) is not None  # read once, because the place's thread may change it
            and due_s <= now_s
            # An address never takes a place from an address with fewer places.
            and by_address[place.address] >= by_address[newcomer.address]
            and (place.body_bytes or not only_with_bytes)
        ]
        if not late:
            return False
        place = max(late, key=lambda each: each[:2])[2]
        self._places.discard(place)
        self._leaving.add(place)
        self._body_bytes -= place.body_bytes
        place.body_bytes = 0
        place.end(EVICTED)
        return True


def busy(reason: str) -> HttpError:
    """Return the answer for a lack of places or memory: `reason`, and the advice to try again.

    The answer closes the connection, which frees the connection's place.
    """
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}: try again", retry_after_s=1.0, closes=True)


def address_of(peer: Any) -> bytes | str:
    """Return the whole IPv4 address, the first 64 bits of an IPv6 address, or "" for a Unix socket."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0]).partition("%")[0]
    if ":" not in host:
        return host
    parsed = ipaddress.IPv6Address(host)
    return parsed.packed[:8] if parsed.ipv4_mapped is None else str(parsed.ipv4_mapped)
