"""A new connection takes the place of the right client. The tests set the clock."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from edgert.http.admission import EVICTED, Admission, Place, address_of
from edgert.http.limits import BODY_BYTES_PER_S_MIN, Limits
from edgert.http.messages import HttpError

PLACES = 4
LIMITS = Limits(body_bytes_max=500, connections_max=PLACES)  # two bodies


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(clock: Clock) -> Iterator[Callable[..., Place]]:
    """Makes places; before each place, the clock advances by a second."""
    pairs: list[tuple[socket.socket, socket.socket]] = []

    def make(address: str = "10.0.0.1", **said: object) -> Place:
        clock.now_s += 1
        pairs.append(socket.socketpair())
        place = Place(pairs[-1][0], address, clock())
        for name, value in said.items():
            setattr(place, name, value)
        return place

    yield make
    for pair in pairs:
        for end in pair:
            end.close()


def ended(places: list[Place]) -> list[int]:
    return [number for number, place in enumerate(places) if place.end_reason]


def test_a_new_client_takes_the_place_of_the_client_that_is_most_overdue(
    clock: Clock, client: Callable[..., Place]
) -> None:
    admission, places = Admission(LIMITS, clock), [client() for _ in range(PLACES)]
    assert all(map(admission.admit, places))
    places[0].due_s = None  # its request is handled
    places[2].due_s = clock() + 5
    assert admission.admit(client())
    assert ended(places) == [1]
    assert admission.admit(client())
    assert ended(places) == [1, 3]


def test_a_client_whose_request_is_handled_keeps_its_place(clock: Clock, client: Callable[..., Place]) -> None:
    admission, places = Admission(LIMITS, clock), [client(due_s=None) for _ in range(PLACES)]
    assert all(map(admission.admit, places))
    assert not admission.admit(client())
    assert ended(places) == []


def test_an_address_with_many_places_takes_no_place_from_an_address_with_few(
    clock: Clock, client: Callable[..., Place]
) -> None:
    admission = Admission(LIMITS, clock)
    few, many = client("10.0.0.2"), [client() for _ in range(PLACES - 1)]
    assert all(map(admission.admit, (few, *many)))
    for _ in range(PLACES - 1):
        assert admission.admit(client())
    assert not few.end_reason
    assert all(place.end_reason for place in many)
    assert admission.admit(client("10.0.0.3"))
    assert not few.end_reason


def test_ended_places_count_until_their_clients_leave(clock: Clock, client: Callable[..., Place]) -> None:
    admission, places = Admission(LIMITS, clock), [client() for _ in range(2 * PLACES)]
    assert all(map(admission.admit, places))
    assert not admission.admit(client())
    admission.leave(places[0])
    assert admission.admit(client())


def test_a_body_that_arrives_fast_keeps_its_memory_and_a_slow_body_loses_its_memory(
    clock: Clock, client: Callable[..., Place]
) -> None:
    admission, quick, slow = Admission(LIMITS, clock), client(), client()
    assert all(map(admission.admit, (quick, slow)))
    for place in (quick, slow):
        place.due_s = clock()
        admission.add_bytes(place, 400)
        place.note_progress(10**9, clock())  # excuses a second
    for _ in range(20):
        clock.now_s += 0.5
        quick.note_progress(BODY_BYTES_PER_S_MIN // 2, clock())
        slow.note_progress(1, clock())
    newcomer = client()
    assert admission.admit(newcomer)
    clock.now_s -= 1
    admission.add_bytes(newcomer, 400)
    assert (quick.end_reason, slow.end_reason) == ("", EVICTED)
    with pytest.raises(HttpError) as raised:
        admission.add_bytes(newcomer, 400)
    assert raised.value.retry_after_s == 1.0


def test_the_memory_of_bodies_is_counted_exactly(clock: Clock, client: Callable[..., Place]) -> None:
    admission, place = Admission(LIMITS, clock), client()
    assert admission.admit(place)
    for _ in range(3):
        admission.add_bytes(place, 1000)
        admission.release_bytes(place)
    admission.add_bytes(place, 600)
    admission.leave(place)
    assert admission.is_empty
    other = client()
    assert admission.admit(other)
    admission.add_bytes(other, 1000)
    with pytest.raises(HttpError):
        admission.add_bytes(other, 1)


def test_an_ipv6_address_counts_as_its_network() -> None:
    assert address_of(("fe80::1%eth0", 5, 0, 2)) == address_of(("fe80::2", 6, 0, 0))
    assert address_of(("2001:db8::1", 5, 0, 0)) != address_of(("2001:db8:0:1::1", 5, 0, 0))
    assert address_of(("::ffff:10.0.0.1", 5, 0, 0)) == address_of(("10.0.0.1", 7))
    assert address_of("") == address_of(b"")


def test_a_connection_whose_request_becomes_complete_while_a_late_client_is_chosen_is_no_fault(
    clock: Clock, client: Callable[..., Place]
) -> None:
    """The thread of the connection sets `due_s` to None without the lock of the admission."""

    class Completed(Place):
        reads = 0

        @property
        def due_s(self) -> float | None:
            self.reads += 1
            return 0.0 if self.reads == 1 else None

        @due_s.setter
        def due_s(self, due_s: float | None) -> None: ...

    admission, places = Admission(LIMITS, clock), [client() for _ in range(PLACES)]
    places[0].__class__ = Completed
    assert all(map(admission.admit, places))
    assert admission.admit(client())
    assert len(ended(places)) == 1
