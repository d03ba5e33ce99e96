"""Messages between the supervisor and its workers."""

from __future__ import annotations

from edgert.worker_link import link


def test_what_an_end_said_before_it_closed_arrives_though_it_left_a_message_unread() -> None:
    """The fork server says why it cannot fork, and never reads the order of the worker that it could not make."""
    ours, theirs = link.pair()
    link.send(ours, {"op": "load"})
    link.send(theirs, {"op": "failed", "message": "no processes"})
    theirs.close()
    assert link.receive(ours) == ({"op": "failed", "message": "no processes"}, [])
    assert link.receive(ours) is None
    ours.close()


def test_a_message_that_repeats_is_the_receivers_own_each_time() -> None:
    ours, theirs = link.pair()
    with ours, theirs:
        for _ in range(2):
            link.send(ours, {"op": "connection", "probe": True})
            message, _ = link.receive(theirs) or ({}, [])
            assert message == {"op": "connection", "probe": True}
            message.clear()
