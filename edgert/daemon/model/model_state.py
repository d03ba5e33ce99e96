"""The states of a model in the daemon, as a table, and what a client is told while the model does not serve."""

from __future__ import annotations

from enum import Enum

from edgert.errors import EdgeRTError, ModelNotFound, ShuttingDown, Unavailable

RETRY_S = 0.1  # when a client asks again while a model loads


class ModelState(str, Enum):
    """The state of one model."""

    STOPPED = "stopped"  # no version is live
    UNLOADED = "unloaded"  # it loads when a client asks for it
    WAITING = "waiting"  # for memory that other models use, or until others have loaded
    LOADING = "loading"
    SERVING = "ready"
    SWAPPING = "swapping"  # one worker serves while another loads
    RESTARTING = "restarting"  # its worker ended; the next starts after a pause
    QUARANTINED = "quarantined"  # too many workers ended; the next starts after a long pause
    FAILED = "failed"  # it does not load, and no restart is planned
    STOPPING = "stopping"  # the daemon stops


class Event(Enum):
    """An event that may change the state."""

    NOTHING_LIVE = "the slots name no version"
    NOT_WANTED = "no client asks for it, and the memory is limited"
    NO_ROOM = "other models use the memory, or load"
    STARTED = "a worker loads a version"
    LOADED = "that version is ready"
    LOAD_ENDED = "the worker that loads ended"
    WORKER_ENDED = "the worker that serves ended"
    RETRY = "a restart is planned"
    QUARANTINE = "a late restart is planned"
    FAIL = "no restart is planned"
    UNLOAD = "another model needs its memory"
    STOP = "the daemon stops"


_S, _E = ModelState, Event
_IDLE = (_S.STOPPED, _S.UNLOADED, _S.WAITING, _S.RESTARTING, _S.QUARANTINED, _S.FAILED)
_BUSY = (_S.LOADING, _S.SERVING, _S.SWAPPING)
_PLANS = (_E.NO_ROOM, _E.NOT_WANTED, _E.RETRY, _E.QUARANTINE, _E.FAIL)  # for later, while a worker loads or serves
_FROM_IDLE = {
    _E.NOTHING_LIVE: _S.STOPPED,
    _E.NOT_WANTED:   _S.UNLOADED,
    _E.NO_ROOM:      _S.WAITING,
    _E.STARTED:      _S.LOADING,
    _E.RETRY:        _S.RESTARTING,
    _E.QUARANTINE:   _S.QUARANTINED,
    _E.FAIL:         _S.FAILED,
    _E.STOP:         _S.STOPPING,
}  # fmt: skip

TRANSITIONS: dict[tuple[ModelState, Event], ModelState] = {
    **{(state, event): after for state in _IDLE for event, after in _FROM_IDLE.items()},
    **{(state, event): state for state in _BUSY for event in _PLANS},
    (_S.LOADING,  _E.LOADED):       _S.SERVING,
    (_S.LOADING,  _E.LOAD_ENDED):   _S.FAILED,
    (_S.LOADING,  _E.STOP):         _S.STOPPING,
    (_S.SERVING,  _E.NOTHING_LIVE): _S.STOPPED,
    (_S.SERVING,  _E.STARTED):      _S.SWAPPING,
    (_S.SERVING,  _E.WORKER_ENDED): _S.FAILED,
    (_S.SERVING,  _E.UNLOAD):       _S.UNLOADED,
    (_S.SERVING,  _E.STOP):         _S.STOPPING,
    (_S.SWAPPING, _E.LOADED):       _S.SERVING,
    (_S.SWAPPING, _E.LOAD_ENDED):   _S.SERVING,
    (_S.SWAPPING, _E.WORKER_ENDED): _S.LOADING,
    (_S.SWAPPING, _E.UNLOAD):       _S.LOADING,
    (_S.SWAPPING, _E.STOP):         _S.STOPPING,
}  # fmt: skip


def step(before: ModelState, event: Event) -> ModelState:
    """Return the state after `event`. Nothing changes once the daemon stops."""
    return before if before is ModelState.STOPPING else TRANSITIONS[before, event]


def unavailable(
    model: str, state: ModelState, fault: EdgeRTError | None, crashes: int, restart_in_s: float | None
) -> EdgeRTError:
    """Return why a model does not answer, and when a client asks again."""
    if state is ModelState.STOPPING:
        return ShuttingDown("the daemon is stopping", retry_after_s=1.0)
    if state is ModelState.STOPPED:
        return ModelNotFound(f"model {model} is not active; deploy it")
    if state is ModelState.QUARANTINED and fault is not None:
        message = f"model {model} is quarantined, it failed {crashes} times in a row: {fault.message}"
        return Unavailable(message, retry_after_s=max(RETRY_S, restart_in_s or 0.0))
    if state is ModelState.FAILED and fault is not None:
        return Unavailable(f"model {model} does not load: {fault.message}")
    return Unavailable(f"model {model} is {state.value}", retry_after_s=RETRY_S)
