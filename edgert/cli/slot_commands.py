"""Helpers of `activate`, `mark-good` and `rollback`: change slots and notify the daemon."""

from __future__ import annotations

from typing import Any

from edgert.cli.output import progress
from edgert.config import check_is_device
from edgert.errors import DaemonEnded, DaemonUnreachable, ModelNotFound
from edgert.protocol.control import SYNC_S_MAX, ask
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore


def store_of(state: StateDir, model: str) -> SlotStore:
    """Return the slots of an installed model.

    Raises ModelNotFound; also ConfigInvalid if the folder is not a device's state folder.
    """
    names = state.model_names()
    if not names:
        check_is_device(state)
    if model not in names:
        raise ModelNotFound(f"unknown model {model!r}; this device has: {', '.join(names) or 'none'}")
    return SlotStore(state.models / model)


def serve_live(state: StateDir, model: str) -> dict[str, Any] | None:
    """Let the daemon serve the live version; return the model's status, or None if no daemon runs.

    Raises the error that prevents the daemon from serving this version.
    """
    try:
        return ask(state.control_socket, {"op": "sync", "model": model}, SYNC_S_MAX)
    except DaemonEnded:  # this version may have ended the daemon
        raise
    except DaemonUnreachable:
        progress("no daemon runs: the next daemon serves this version; start it with edgertd start")
        return None
