"""The recorder: writes MQTT messages to the store in batches. It does no I/O besides the store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from edgert.telemetry.messages import PAYLOAD_BYTES_MAX, HistMessage, MetricsMessage, Scalar, Topic
from edgert.telemetry.mqtt import UNACKNOWLEDGED_MAX
from edgert_deploy.fleet.listener import FleetListener
from edgert_deploy.fleet.reports import EventMessage, Report, storable
from edgert_deploy.fleet.store.batch import Batch, Origin
from edgert_deploy.fleet.store.database import StoreFailed
from edgert_deploy.fleet.store.retention import Retention
from edgert_deploy.fleet.store.store import Store

REMOVED = "removed"  # the status of a device that was uninstalled or forgotten
WAITING_MAX = 50_000
PRUNE_EVERY_S = 600.0
TRUSTED_MS_MAX = 86_400_000  # the age of rows counts from at most this long after the newest report
# A device may enlarge its payloads with fields. All messages that a session may deliver fit into this size.
WAITING_BYTES_MAX = UNACKNOWLEDGED_MAX * PAYLOAD_BYTES_MAX


class Recorder(FleetListener):
    """Collects messages and writes them to the store. `wall_clock_ms` returns ms since 1970.

    While the store fails, messages wait: at most WAITING_MAX messages, and at most WAITING_BYTES_MAX bytes. Above these
    limits, the recorder drops and counts new messages.
    """

    def __init__(
        self,
        store: Store,
        wall_clock_ms: Callable[[], int],
        retention: Retention | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(wall_clock_ms)
        self.recorded = self.duplicates = self.dropped = 0
        self.handled = 0  # messages, counted from the first, that are stored, refused or dropped
        self.failures = 0  # consecutive flushes in which the store failed
        self._applied = self._bytes = 0
        self._store = store
        self._wall_clock_ms = wall_clock_ms
        self._batch = Batch()
        self._retention, self._pruned_at = retention or Retention(), float("-inf")
        self._clock, self._began = clock, clock()
        # The newest time of a report by a synchronized clock; 0 if only other reports came; None before any report.
        self._newest_ms: int | None = None

    @property
    def waiting(self) -> int:
        return len(self._batch)

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        self._applied += 1
        if len(self._batch) >= WAITING_MAX or self._bytes >= WAITING_BYTES_MAX:
            self.dropped += 1
            return
        refused = self.refused
        super().apply(topic, payload, retained, now)
        if self.refused == refused:
            self._bytes += len(payload)

    def flush(self) -> None:
        """Write the waiting reports. Raises StoreFailed; then the reports wait for the next flush."""
        if len(self._batch) or self._batch.heard_ms:
            self.failures += 1
            new = self._store.write(self._batch)
            self.recorded += new
            self.duplicates += self._batch.reports - new
            self.failures, self._bytes, self._batch = 0, 0, Batch()
        self.handled = self._applied

    def flush_or_wait(self, say: Callable[[str], None]) -> None:
        """Write the waiting reports. `say` receives failures 1, 2, 4, 8 ... in a row, and the recovery."""
        failed = self.failures > 0
        try:
            self.flush()
        except StoreFailed as error:
            if self.failures & (self.failures - 1) == 0:
                say(f"{error.message}; reports: {self.waiting} waiting, {self.dropped} dropped; retrying")
        else:
            if failed and not self.failures:
                say("the store works again: the waiting reports are written")

    def prune_when_due(self, say: Callable[[str], None]) -> None:
        """Remove rows that are older than the retention, at most every PRUNE_EVERY_S."""
        now = self._clock()
        if now - self._pruned_at > PRUNE_EVERY_S and (now_ms := self._confirmed_ms(now)):
            self._pruned_at = now
            try:
                self._store.prune(self._retention, now_ms)
            except StoreFailed as error:
                say(f"{error.message}; old reports are removed later")

    def _confirmed_ms(self, now: float) -> int:
        """Return the time of this host's clock, as far as reports confirm it; 0 before they do.

        A clock that is years ahead would remove the whole store. If no device has a synchronized clock, this host's
        clock counts.
        """
        if self._newest_ms:
            return min(self._wall_clock_ms(), self._newest_ms + TRUSTED_MS_MAX)
        return self._wall_clock_ms() if self._newest_ms == 0 and now - self._began > PRUNE_EVERY_S else 0

    def on_message(self, topic: Topic, retained: bool, now: float) -> None:
        if not retained:
            self._batch.heard_ms[topic.site, topic.device] = self._wall_clock_ms()

    def on_cleared(self, topic: Topic) -> None:
        if topic.kind == "status":
            self._describe(topic, {"status": REMOVED})

    def on_status(self, topic: Topic, status: str, now: float) -> None:
        self._describe(topic, {"status": status})

    def on_fields(self, topic: Topic, fields: Mapping[str, Scalar], now: float) -> None:
        described = {topic.kind: json.dumps(fields)}
        if topic.kind == "info" and isinstance(profile := fields.get("profile"), str):
            described["profile"] = storable(profile)
        self._describe(topic, described)

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        if hist is not None:
            self._note_time(hist)
            self._batch.hists.append((self._origin(topic), hist))

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        self._note_time(metrics)
        self._batch.metrics.append((self._origin(topic), metrics))

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        self._note_time(event)
        self._batch.events.append((self._origin(topic), event))

    def _note_time(self, report: Report) -> None:
        self._newest_ms = max(self._newest_ms or 0, report.ts_ms if report.clock_synced else 0)

    def _describe(self, topic: Topic, described: dict[str, str]) -> None:
        self._batch.devices.setdefault((topic.site, topic.device), {}).update(described)

    def _origin(self, topic: Topic) -> Origin:
        return Origin(topic.site, topic.device, self._wall_clock_ms(), topic.model or "")
