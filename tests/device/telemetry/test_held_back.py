"""Several connections identify the message that a broker refuses, and no other message."""

from __future__ import annotations

from edgert.telemetry.held_back import HANG_UPS_MAX, HELD_MAX, RETRY_S, SOON_S, HeldBack

TOPIC = "edgert/v1/plant-a/pi-07/event"


def ended(held: HeldBack, *in_flight: int, lasted_s: float = 1.0) -> int | None:
    held.connected(0.0)
    return held.note_lost_connection(in_flight, lasted_s)


def test_a_message_that_several_connections_in_a_row_end_at_is_held_back() -> None:
    held = HeldBack()
    found = [ended(held, 7, *(() if held.one_at_a_time else (8, 9))) for _ in range(HANG_UPS_MAX)]
    assert found == [None] * (HANG_UPS_MAX - 1) + [7]
    assert not held.one_at_a_time
    assert held.add(7, TOPIC, 100)
    assert not held.add(9, TOPIC, 100)
    assert (7 in held, 8 in held) == (True, False)


def test_no_message_is_blamed_for_a_connection_that_lasted_or_had_no_message_in_flight() -> None:
    held = HeldBack()
    for _ in range(2 * HANG_UPS_MAX):
        assert ended(held, 7, lasted_s=SOON_S + 1) is None
        assert ended(held) is None


def test_a_message_that_another_connection_brought_is_not_blamed() -> None:
    held = HeldBack()
    for _ in range(3):
        for _ in range(HANG_UPS_MAX - 1):
            assert ended(held, 7) is None
        held.acknowledged(7, TOPIC, 100)
    for first in range(20):  # the link breaks often, each time after one more message
        assert ended(held, first, 20) is None


def test_a_held_back_message_is_tried_again_a_day_later() -> None:
    held = HeldBack()
    held.connected(100.0)
    held.add(7, TOPIC, 100)
    held.connected(RETRY_S)
    assert 7 in held
    held.connected(RETRY_S + 101)
    assert 7 not in held


def test_a_message_that_is_held_back_is_tried_again_once_the_broker_accepts_a_similar_one() -> None:
    held = HeldBack()
    held.add(7, TOPIC, 100)
    assert not held.acknowledged(8, TOPIC, 99)
    assert not held.acknowledged(9, "another", 1000)
    assert 7 in held
    assert held.acknowledged(10, TOPIC, 100)
    assert 7 not in held
    held.add(7, TOPIC, 100)  # the connections ended at it again: the link is not the reason
    assert not held.acknowledged(11, TOPIC, 1000)
    assert 7 in held


def test_held_back_messages_that_a_full_spool_has_dropped_take_no_memory() -> None:
    held = HeldBack()
    for message in range(HELD_MAX + 10):
        held.add(message, "hist", 900)
    assert (9 in held, 10 in held, HELD_MAX + 9 in held) == (False, True, True)
