"""The table of a model's states is complete, and a client is told what to do."""

from __future__ import annotations

import pytest

from edgert.daemon.model.model_state import RETRY_S, TRANSITIONS, Event, ModelState, step, unavailable
from edgert.errors import EngineFailed, ModelNotFound, ShuttingDown, Unavailable


def test_every_state_is_reached_and_can_stop() -> None:
    assert {ModelState.STOPPED, *TRANSITIONS.values()} == set(ModelState)
    for state in ModelState:
        assert step(state, Event.STOP) is ModelState.STOPPING


def test_nothing_changes_once_the_daemon_stops() -> None:
    assert {step(ModelState.STOPPING, event) for event in Event} == {ModelState.STOPPING}


def test_an_event_that_cannot_happen_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        step(ModelState.STOPPED, Event.LOADED)


@pytest.mark.parametrize(
    ("state", "error", "words", "retry_s"),
    [
        (ModelState.STOPPED, ModelNotFound, "deploy it", None),
        (ModelState.STOPPING, ShuttingDown, "stopping", 1.0),
        (ModelState.LOADING, Unavailable, "is loading", RETRY_S),
        (ModelState.QUARANTINED, Unavailable, "failed 3 times in a row: it broke", 30.0),
        (ModelState.FAILED, Unavailable, "does not load: it broke", None),
    ],
)
def test_a_client_is_told_why_and_when(
    state: ModelState, error: type[Exception], words: str, retry_s: float | None
) -> None:
    found = unavailable("echo", state, EngineFailed("it broke"), 3, 30.0)
    assert isinstance(found, error)
    assert words in found.message
    assert found.retry_after_s == retry_s
