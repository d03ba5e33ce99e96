"""What `activate`, `mark-good` and `rollback` share: change a model's slots, let the daemon follow."""

from __future__ import annotations

from typing import Any

from edgert.cli.output import progress
from edgert.config import StateDir
from edgert.errors import DaemonUnreachable, ModelNotFound
from edgert.protocol.control import ask
from edgert.versions.slot_store import SlotStore

FOLLOW_S_MAX = 240.0  # longer than a worker may take to load


def store_of(state: StateDir, model: str) -> SlotStore:
    """The slots of an installed model. Raises ModelNotFound, naming those there are."""
    names = state.model_names()
    if model not in names:
        raise ModelNotFound(f"no model is called {model!r} here; there are: {', '.join(names) or 'none'}")
    return SlotStore(state.models / model)


def follow(state: StateDir, model: str) -> dict[str, Any] | None:
    """Have the daemon serve what the slots now name; None where no daemon runs. Raises what it could not do."""
    try:
        return ask(state.control_socket, {"op": "sync", "model": model}, FOLLOW_S_MAX)
    except DaemonUnreachable:
        progress("no daemon runs here; it will serve this version when it starts (edgertd start)")
        return None
