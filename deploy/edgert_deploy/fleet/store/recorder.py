"""The recorder: MQTT messages into the store, a batch at a time. Pure but for the store it is given."""

from __future__ import annotations

import json
from collections.abc import Callable

from edgert.errors import ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, parse_topic
from edgert.telemetry.mqtt import HANDED_MAX
from edgert_deploy.fleet.reports import KINDS, parse_report, storable, stream_of
from edgert_deploy.fleet.store.batch import Batch, Heard
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.fleet.stream_limit import StreamLimit

WAITING_MAX = 50_000
# As they came: a device may fill its reports with words of its own. What a session may be handed has room.
WAITING_BYTES_MAX = HANDED_MAX * messages.PAYLOAD_BYTES_MAX


class Recorder:
    """Collects what is heard and writes it. `wall_clock_ms` is ms since 1970.

    While the store refuses, messages are kept up to WAITING_MAX, or WAITING_BYTES_MAX of them, and then the newest are dropped and counted.
    """

    def __init__(self, store: Store, wall_clock_ms: Callable[[], int]) -> None:
        self.recorded = self.duplicates = self.refused = self.dropped = 0
        self.settled = 0  # so many of the messages applied, from the first, are in the store or will never be
        self.failures = 0  # flushes in a row that the store refused
        self.last_refusal = ""
        self._applied = self._bytes = 0
        self._store = store
        self._wall_clock_ms = wall_clock_ms
        self._batch = Batch()
        self._limit = StreamLimit()

    @property
    def waiting(self) -> int:
        return len(self._batch)

    @property
    def tells(self) -> bool:
        """Whether this failure is worth a line: the first in a row, the second, the fourth, the eighth, ..."""
        return self.failures & (self.failures - 1) == 0

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        """Take one message in."""
        self._applied += 1
        if len(self._batch) >= WAITING_MAX or self._bytes >= WAITING_BYTES_MAX:
            self.dropped += 1
            return
        try:
            self._apply(topic, payload, retained, now)
            self._bytes += len(payload)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic[:120]}: {error.message}"

    def flush(self) -> None:
        """Write what waits. Raises StoreFailed; nothing is lost then, and the next flush tries again."""
        if len(self._batch) or self._batch.heard_ms:
            self.failures += 1
            written = self._store.write(self._batch)
            self.failures, self._bytes, self._batch = 0, 0, Batch()
            self.recorded += written.hists + written.metrics + written.events
            self.duplicates += written.duplicates
        self.settled = self._applied

    def _apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        parsed = parse_topic(topic)
        heard = Heard(parsed.site, parsed.device, self._wall_clock_ms(), parsed.model or "")
        key, batch = (parsed.site, parsed.device), self._batch
        if parsed.kind not in KINDS:
            said = _device_fields(parsed.kind, payload)  # first: it may refuse
            batch.devices.setdefault(key, {}).update(said)
        else:
            report = parse_report(parsed, payload)
            self._limit.check(*key, stream_of(parsed, report), now)
            if isinstance(report, HistMessage):
                batch.hists.append((heard, report))
            elif isinstance(report, MetricsMessage):
                batch.metrics.append((heard, report))
            else:
                batch.events.append((heard, report))
        if not retained:
            batch.heard_ms[key] = heard.at_ms


def _device_fields(kind: str, payload: bytes) -> dict[str, str]:
    if kind == "status":
        return {"status": messages.parse_status(payload)}
    fields = messages.load(payload)
    said = {kind: json.dumps(fields)}
    if kind == "info" and isinstance(profile := fields.get("profile"), str):
        said["profile"] = storable(profile)
    return said
