"""Messages between the supervisor and its workers."""

from __future__ import annotations

from edgert.worker_link import link


def test_the_last_message_arrives_even_if_its_sender_closed_with_a_message_unread() -> None:
    """The fork server sends the reason why it cannot fork, and never reads the order for that worker."""
    ours, theirs = link.pair()
    link.send(ours, {"op": "load"})
    link.send(theirs, {"op": "failed", "message": "no processes"})
    theirs.close()
    assert link.receive(ours) == ({"op": "failed", "message": "no processes"}, [])
    assert link.receive(ours) is None
    ours.close()


def test_a_repeated_message_is_a_new_object_for_the_receiver_each_time() -> None:
    ours, theirs = link.pair()
    with ours, theirs:
        for _ in range(2):
            link.send(ours, {"op": "connection", "probe": True})
            message, _ = link.receive(theirs) or ({}, [])
            assert message == {"op": "connection", "probe": True}
            message.clear()
