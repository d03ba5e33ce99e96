"""The supervisor's own telemetry: events, and the state of each model's slots.

The reporter imports the telemetry modules at the first message, so that a supervisor without messages stays small. If
the spool refuses a message, the message is lost; the daemon logs this and continues.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from edgert.config import DeviceConfig
from edgert.environment import release_in_use
from edgert.errors import EdgeRTError
from edgert.log import log
from edgert.names import RUNTIME
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore

if TYPE_CHECKING:
    from edgert.telemetry.spool import Spool

REASON_LENGTH_MAX = 300
QUEUE_MAX = 256
CLOSE_S_MAX = 2.0


class DeviceReporter:
    """Writes messages into the spool in its own thread, because a slow disk must not delay the supervisor.

    Payloads are flat: texts, numbers, booleans.
    """

    def __init__(self, state: StateDir, config: DeviceConfig, boot: str) -> None:
        self._state = state
        self._config = config
        self._boot = boot
        self._queue: queue.Queue[Callable[[Spool], object] | None] = queue.Queue(QUEUE_MAX)
        self._thread: threading.Thread | None = None

    def event(self, name: str, model: str | None, fields: dict[str, Any]) -> None:
        """Report an event of `model`, or of the device if `model` is None.

        If `fields` has a `release`, the message also has a `model_version`.
        """
        from edgert.telemetry.messages import Topics, release_id, wall_ms
        from edgert.telemetry.reporter import append_event

        flat = {k: v[:REASON_LENGTH_MAX] if isinstance(v, str) else v for k, v in fields.items()}
        if fields.get("release") is not None:
            flat["model_version"] = release_id(fields["release"])
        topics = Topics(self._config.site, self._config.device)
        ts_ms = wall_ms()
        self._enqueue(
            lambda spool: append_event(spool, topics, name, boot=self._boot, ts_ms=ts_ms, model=model, **flat)
        )

    def slots(self, models: Iterable[tuple[SlotStore, tuple[str, ...]]], own_alarms: tuple[str, ...]) -> None:
        """Report each model's slots and alarms, and the device's own alarms. The broker retains the message."""
        from edgert.telemetry.messages import Topics, envelope, release_id, wall_ms

        fields: dict[str, object] = {**envelope(ts_ms=wall_ms(), boot=self._boot)}
        for store, alarms in models:
            model = store.folder.name
            try:
                slots = store.read()
            except EdgeRTError as error:
                log(f"{model}: {error.message}")
                continue
            live, spare = slots.live, slots.spare
            fields[f"{model}_state"] = slots.state.value
            fields[f"{model}_active"] = release_id(live.release) if live else "none"
            fields[f"{model}_spare"] = release_id(spare.release) if spare else "none"
            fields[f"{model}_alarms"] = ",".join(alarms) or None
        fields["alarms"] = ",".join(own_alarms) or None
        if (runtime := release_in_use()) is not None:
            fields[f"{RUNTIME}_active"] = release_id(runtime)
        topic = Topics(self._config.site, self._config.device).deploy
        self._enqueue(lambda spool: spool.retain(topic, fields))

    def close(self) -> None:
        """Write the pending messages, for at most CLOSE_S_MAX."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S_MAX)

    def _enqueue(self, write: Callable[[Spool], object]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="device-reporter", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit of threads is reached
                log(f"telemetry: a message of the device is lost, because no thread can be started: {error}")
                return
            self._thread = thread
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            log("telemetry: a message of the device is lost, because the disk of the spool is too slow")

    def _run(self) -> None:
        from edgert.telemetry.spool import Spool

        while (write := self._queue.get()) is not None:
            try:
                with contextlib.closing(Spool(self._state.spool, log=log)) as spool:
                    write(spool)
            except EdgeRTError as error:
                log(f"telemetry: a message of the device is lost: {error.message}")
