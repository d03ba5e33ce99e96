"""A change of the slots succeeds at once, succeeds later, or fails finally."""

from __future__ import annotations

import pytest

from edgert.daemon.model.slot_writer import BUSY_RETRY_S, STORAGE_RETRY_S, SlotWriter
from edgert.errors import SlotsBusy, StorageFailed, TransitionRefused


class Change:
    """A change that fails with each of the errors in turn, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize(("error", "pause_s"), [(SlotsBusy("x"), BUSY_RETRY_S), (StorageFailed("x"), STORAGE_RETRY_S)])
def test_a_change_is_tried_again_after_a_pause(error: Exception, pause_s: float) -> None:
    now_s = 100.0
    writer, change = SlotWriter(lambda: now_s), Change(error)
    assert writer.attempt("it", change) is error
    assert writer.due_s() == 100.0 + pause_s
    writer.tick()
    assert change.calls == 1
    now_s += pause_s
    writer.tick()
    assert (change.calls, writer.due_s()) == (2, None)


def test_a_newer_change_replaces_the_pending_one_of_its_name() -> None:
    times_s = iter([0.0, 1.0])
    writer, old, new = SlotWriter(lambda: next(times_s)), Change(SlotsBusy("x")), Change()
    writer.attempt("it", old)
    assert writer.attempt("it", new) is None
    writer.tick()
    assert (old.calls, new.calls) == (1, 1)


def test_a_refused_change_is_not_tried_again() -> None:
    writer, refused = SlotWriter(lambda: 0.0), TransitionRefused("x")
    assert writer.attempt("it", Change(refused)) is refused
    assert writer.due_s() is None
