"""How a model stands, in one word, and what is said to whoever asks for it while it does not serve."""

from __future__ import annotations

from enum import Enum

from edgert.errors import EdgeRTError, Unavailable

LOADING_RETRY_S = 0.1


class ServingState(str, Enum):
    """What `edgertd status` says of a model."""

    READY = "ready"
    DEGRADED = "degraded"  # serves, but not on its preferred engine
    LOADING = "loading"
    WAITING = "waiting"  # for memory that other models hold
    UNLOADED = "unloaded"  # loaded when somebody asks
    RESTARTING = "restarting"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"


def unavailable(
    model: str, state: ServingState, fault: EdgeRTError | None, crashes: int, restart_in_s: float | None
) -> Unavailable:
    """Why an active model does not answer now, and when to ask again."""
    if state is ServingState.QUARANTINED and restart_in_s is not None and fault is not None:
        reason = f"{crashes} times in a row: {fault.message}"
        return Unavailable(f"model {model} is quarantined, it failed {reason}", retry_after_s=restart_in_s)
    if state is ServingState.FAILED and fault is not None:
        return Unavailable(f"model {model} does not load: {fault.message}")
    return Unavailable(f"model {model} is {state.value}", retry_after_s=LOADING_RETRY_S)
