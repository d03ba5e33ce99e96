"""While a model does not serve, clients get an error with the reason and the next step."""

from __future__ import annotations

import pytest

from edgert.daemon.model.model_state import RETRY_S, ModelState, unavailable
from edgert.errors import EngineFailed, ModelNotFound, ShuttingDown, Unavailable


@pytest.mark.parametrize(
    ("state", "error", "words", "retry_s"),
    [
        (ModelState.STOPPED, ModelNotFound, "deploy one", None),
        (ModelState.STOPPING, ShuttingDown, "stopping", 1.0),
        (ModelState.LOADING, Unavailable, "is loading", RETRY_S),
        (ModelState.QUARANTINED, Unavailable, "failed 3 times in a row: it broke", 30.0),
        (ModelState.FAILED, Unavailable, "does not load: it broke", None),
    ],
)
def test_the_error_tells_a_client_why_the_model_is_unavailable_and_when_to_retry(
    state: ModelState, error: type[Exception], words: str, retry_s: float | None
) -> None:
    found = unavailable("echo", state, EngineFailed("it broke"), 3, 30.0)
    assert isinstance(found, error)
    assert words in found.message
    assert found.retry_after_s == retry_s
