"""Events of the follower, in the spool that the forwarder sends."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgert.checks.status import ask_daemon
from edgert.config import DeviceConfig, StateDir
from edgert.errors import EdgeRTError
from edgert.log import log
from edgert.telemetry.messages import Topics

REASON_LENGTH_MAX = 300


def reporter(state: StateDir, config: DeviceConfig) -> Callable[[str, str | None, dict[str, str | int]], None]:
    """Return what reports an event, its model and its fields. A full disk, or no daemon, costs only the event."""
    topics = Topics(config.site, config.device)

    def report(event: str, model: str | None, fields: dict[str, str | int]) -> None:
        from edgert.telemetry.reporter import append_event
        from edgert.telemetry.spool import Spool

        flat = {key: value[:REASON_LENGTH_MAX] if isinstance(value, str) else value for key, value in fields.items()}
        try:
            boot = ask_daemon(state.control_socket).boot
            spool = Spool(state.spool, log=log)
            try:
                append_event(spool, topics, event, boot=boot, ts_ms=int(time.time() * 1000), model=model, **flat)
            finally:
                spool.close()
        except EdgeRTError as error:
            log(f"telemetry: not recorded: {error.message}")

    return report
