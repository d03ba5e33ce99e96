"""The states of a model in the daemon, and the error for clients while the model does not serve."""

from __future__ import annotations

from enum import Enum

from edgert.errors import EdgeRTError, ModelNotFound, ShuttingDown, Unavailable

RETRY_S = 0.1  # a client's pause before its next attempt while a model loads


class ModelState(str, Enum):
    """The state of one model.

    In the first three states, the model has a worker. Each other state is a reason why it has none. No state depends on
    the previous state, so there is no table of transitions (decision 30).
    """

    SERVING = "ready"
    DEGRADED = "degraded"  # the model serves, but not on its first engine
    LOADING = "loading"  # a version loads, and none serves
    STOPPED = "stopped"  # no version is live
    UNLOADED = "unloaded"  # the model loads when a client requests it
    WAITING = "waiting"  # the model waits for memory that other models use, or until other models have loaded
    RESTARTING = "restarting"  # the worker ended; the next worker starts after a pause
    QUARANTINED = "quarantined"  # too many workers ended; the next worker starts after a long pause
    FAILED = "failed"  # the model does not load, and no restart is planned
    STOPPING = "stopping"  # the daemon stops


def unavailable(
    model: str, state: ModelState, fault: EdgeRTError | None, crashes: int, restart_in_s: float | None
) -> EdgeRTError:
    """Return the error for clients of a model that does not serve, with the pause before a retry.

    Args:
        state: The reason why no worker serves.
        crashes: The number of workers that ended in a row.
        restart_in_s: The time until the next restart; None if no restart is planned.
    """
    if state is ModelState.STOPPING:
        return ShuttingDown("the daemon is stopping", retry_after_s=1.0)
    if state is ModelState.STOPPED:
        return ModelNotFound(f"no version of model {model} is live: deploy one")
    if state is ModelState.QUARANTINED and fault is not None:
        message = f"model {model} is quarantined, because it failed {crashes} times in a row: {fault.message}"
        return Unavailable(message, retry_after_s=max(RETRY_S, restart_in_s or 0.0))
    if state is ModelState.FAILED and fault is not None:
        return Unavailable(f"model {model} does not load: {fault.message}")
    return Unavailable(f"model {model} is {state.value}", retry_after_s=RETRY_S)
