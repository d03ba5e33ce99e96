"""The recorder: MQTT messages into the store, a batch at a time. Pure but for the store it is given."""

from __future__ import annotations

import json
from collections.abc import Callable

from edgert.errors import ProtocolError
from edgert.names import ID, ID_CHARS_MAX
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, Scalar, parse_topic
from edgert_deploy.fleet.packed import WINDOW_COUNT_MAX
from edgert_deploy.fleet.store import COUNTER_FIELDS, Batch, Heard, Store

WAITING_MAX = 50_000
NUMBER_END = 2**53  # every JSON reader keeps integers exact below


class Recorder:
    """Collects what is heard and writes it. `wall_clock_ms` is ms since 1970.

    While the store refuses, messages are kept up to WAITING_MAX and then the newest are dropped and counted.
    """

    def __init__(self, store: Store, wall_clock_ms: Callable[[], int]) -> None:
        self.recorded = self.duplicates = self.refused = self.dropped = 0
        self.last_refusal = ""
        self._store = store
        self._wall_clock_ms = wall_clock_ms
        self._batch = Batch()

    @property
    def waiting(self) -> int:
        return len(self._batch)

    def apply(self, topic: str, payload: bytes, retained: bool, _now: float) -> None:
        """Take one message in."""
        if len(self._batch) >= WAITING_MAX:
            self.dropped += 1
            return
        try:
            self._apply(topic, payload, retained)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic[:120]}: {error.message}"

    def flush(self) -> None:
        """Write what waits. Raises StoreFailed; nothing is lost then, and the next flush tries again."""
        if not len(self._batch) and not self._batch.heard_ms:
            return
        written = self._store.write(self._batch)
        self._batch = Batch()
        self.recorded += written.hists + written.metrics + written.events
        self.duplicates += written.duplicates

    def _apply(self, topic: str, payload: bytes, retained: bool) -> None:
        parsed = parse_topic(topic)
        heard = Heard(parsed.site, parsed.device, self._wall_clock_ms(), parsed.model or "")
        key, batch = (parsed.site, parsed.device), self._batch
        if parsed.kind == "hist":
            hist = HistMessage.from_json(payload)
            _check_key(hist.boot, hist.model_version, hist.seq, hist.ts_ms)
            if hist.sketch.count > WINDOW_COUNT_MAX:
                raise ProtocolError(f"a window of {hist.sketch.count} requests; the limit is {WINDOW_COUNT_MAX}")
            batch.hists.append((heard, hist))
        elif parsed.kind == "metrics":
            metrics = MetricsMessage.from_json(payload)
            _check_key(metrics.boot, metrics.model_version, metrics.seq, metrics.ts_ms)
            for name in COUNTER_FIELDS.values():
                _check_number(name, messages.int_of(metrics.fields, name))
            batch.metrics.append((heard, metrics))
        elif parsed.kind == "event":
            batch.events.append((heard, _event_fields(payload)))
        else:
            batch.devices.setdefault(key, {}).update(_device_fields(parsed.kind, payload))
        if not retained:
            batch.heard_ms[key] = heard.at_ms


def _event_fields(payload: bytes) -> dict[str, Scalar]:
    fields = messages.load(payload)
    boot, seq, ts_ms = messages.text_of(fields, "boot"), messages.int_of(fields, "seq"), messages.int_of(fields, "ts")
    _check_key(boot, "", seq, ts_ms)
    for name in ("event", "model"):
        if name in fields or name == "event":
            fields[name] = _printable(messages.text_of(fields, name))
    return fields


def _check_key(boot: str, version: str, seq: int, ts_ms: int) -> None:
    """What becomes part of a key must fit the columns: a single row that does not would hold up its whole batch."""
    for name, value in (("boot", boot), ("model_version", version)):
        if len(value) > ID_CHARS_MAX or (value and not ID.match(value)):
            raise ProtocolError(f"{name} is {value[:80]!r}, which is no id")
    _check_number("seq", seq)
    _check_number("ts", ts_ms)


def _check_number(name: str, value: int) -> None:
    if not 0 <= value < NUMBER_END:
        raise ProtocolError(f"{name} is {value}; it lies between 0 and 2^53")


def _printable(text: str) -> str:
    """Without what a database refuses in text: NUL and halves of characters."""
    return text.encode(errors="replace").decode().replace("\0", "?")[:ID_CHARS_MAX]


def _device_fields(kind: str, payload: bytes) -> dict[str, str]:
    if kind == "status":
        return {"status": messages.parse_status(payload)}
    fields = messages.load(payload)
    said = {kind: json.dumps(fields)}
    if kind == "info" and isinstance(profile := fields.get("profile"), str):
        said["profile"] = _printable(profile)
    return said
