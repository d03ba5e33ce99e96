"""Events of the follower: the daemon puts them into the spool, and reads the alarm of the channel anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgert.checks.channel_status import ChannelEvent
from edgert.config import StateDir
from edgert.errors import EdgeRTError
from edgert.log import log
from edgert.protocol.control import ask
from edgert.typed_json import to_json


def reporter(state: StateDir) -> Callable[[str, str | None, dict[str, Any]], None]:
    """Return what reports an event, its model and its fields. Without a daemon the event is lost."""

    def report(event: str, model: str | None, fields: dict[str, Any]) -> None:
        try:
            ask(state.control_socket, {"op": "event", **to_json(ChannelEvent(event, model, **fields))})
        except EdgeRTError as error:
            log(f"telemetry: not recorded: {error.message}")

    return report
