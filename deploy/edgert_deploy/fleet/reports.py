"""Reports from the wire (`hist`, `metrics`, `event`), checked before they are stored or exported.

Values that become a part of a key or a label must be ids or small numbers. If a database refused one report, that
report would block all other reports of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgert.errors import ConfigInvalid, ProtocolError
from edgert.names import ID, ID_CHARS_MAX
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, Scalar, Topic
from edgert_deploy.fleet.packed_histograms import WINDOW_COUNT_MAX

KINDS = ("hist", "metrics", "event")
PROFILE_UNKNOWN = "unknown"
WINDOW_S_MAX = 86_400.0  # a longer window would distort the fleet's trend
NUMBER_END = 2**53  # every JSON reader represents integers below this value exactly
# The dimensions by which queries and metrics group reports.
DIMENSIONS = ("site", "device", "model", "version", "profile")
# The counters of the store and the exporter, and their fields in `metrics`.
COUNTER_FIELDS = {"requests": "req_total", "errors": "err_total", "shed": "shed_total", "cache_hits": "cache_hit_total"}


@dataclass(frozen=True)
class EventMessage:
    """An event of a device.

    `model` is "" if the event concerns the whole device; `alarm` is "" if the event is not an alarm.
    """

    ts_ms: int
    boot: str
    seq: int
    event: str
    model: str
    alarm: str
    fields: dict[str, Scalar]

    @property
    def clock_synced(self) -> bool:
        return messages.is_synced(self.fields)


Report = HistMessage | MetricsMessage | EventMessage


def stream_of(topic: Topic, report: Report) -> tuple[str, ...]:
    """Return the key of the device's stream to which the report belongs."""
    if isinstance(report, EventMessage):
        return (report.model, report.event)
    return (report.boot, topic.model or "", report.model_version)


def parse_report(topic: Topic, payload: bytes) -> Report:
    """Decode and check a report. Raises ProtocolError."""
    if topic.kind == "event":
        return _event(payload)
    if topic.kind == "hist":
        hist = HistMessage.from_json(payload)
        _check(hist.boot, hist.model_version, hist.seq, hist.ts_ms, hist.window_s)
        if hist.sketch.count > WINDOW_COUNT_MAX:
            raise ProtocolError(f"a window of {hist.sketch.count} requests; the limit is {WINDOW_COUNT_MAX}")
        return hist
    metrics = MetricsMessage.from_json(payload)
    _check(metrics.boot, metrics.model_version, metrics.seq, metrics.ts_ms, metrics.window_s)
    for value in counters_of(metrics):
        _check_number("a counter", value)
    return metrics


def counters_of(metrics: MetricsMessage) -> tuple[int, ...]:
    """Return the counters in the order of COUNTER_FIELDS. Raises ProtocolError."""
    return tuple(messages.int_of(metrics.fields, name) for name in COUNTER_FIELDS.values())


def increase(
    counters: Sequence[int], before: Sequence[int] | None, report: MetricsMessage, new_spool: bool
) -> tuple[int, ...]:
    """Return the growth of the counters since `before` (docs/telemetry.md).

    If a counter decreased, it restarted at 0, so its growth is its whole value. There is one exception: if counters
    decreased over a lost spool, the cause may also be a restart in the lost part, or a late report of the older spool.
    In this case, and if `before` is None, the growth is the whole value only if the worker started in this window, else
    0.

    Args:
        counters: The counters of `report`.
        before: The counters of the newest earlier report; None if there is none.
        report: The report whose growth the function returns.
        new_spool: Whether a spool was lost between the two reports.
    """
    fell = before is not None and any(value < was for value, was in zip(counters, before, strict=True))
    if before is None or (fell and new_spool):
        began_now = report.number("uptime_s") <= report.window_s + 1
        return tuple(counters) if began_now else (0,) * len(counters)
    return tuple(counters) if fell else tuple(value - was for value, was in zip(counters, before, strict=True))


def dimensions_of(by: str) -> tuple[str, ...]:
    """Return the dimensions that a text such as `model,version` names. Raises ConfigInvalid."""
    names = tuple(dict.fromkeys(word.strip() for word in by.split(",") if word.strip()))
    check_dimensions(names)
    return names


def check_dimensions(names: Iterable[str]) -> None:
    """Raise ConfigInvalid for a name that is not a dimension."""
    for name in names:
        if name not in DIMENSIONS:
            raise ConfigInvalid(f"unknown dimension {name!r}; known: {', '.join(DIMENSIONS)}")


def storable(text: str) -> str:
    """Replace characters that a database refuses (NUL and lone surrogates). Limit the length."""
    return text.encode(errors="replace").decode().replace("\0", "?")[:ID_CHARS_MAX]


def _event(payload: bytes) -> EventMessage:
    fields = messages.load(payload)
    event = EventMessage(
        ts_ms=messages.int_of(fields, "ts"),
        boot=messages.text_of(fields, "boot"),
        seq=messages.int_of(fields, "seq"),
        event=messages.text_of(fields, "event"),
        model=messages.text_of(fields, "model") if "model" in fields else "",
        alarm=messages.text_of(fields, "alarm") if "alarm" in fields else "",
        fields=fields,
    )
    _check_id("event", event.event)
    for name, value in (("model", event.model), ("alarm", event.alarm)):
        if value:
            _check_id(name, value)
    _check(event.boot, "", event.seq, event.ts_ms)
    return event


def _check(boot: str, version: str, seq: int, ts_ms: int, window_s: float = 0.0) -> None:
    for name, value in (("boot", boot), ("model_version", version)):
        if value:
            _check_id(name, value)
    _check_number("seq", seq)
    _check_number("ts", ts_ms)
    if not 0 <= window_s <= WINDOW_S_MAX:
        raise ProtocolError(f"window_s is {window_s}; it must be between 0 and {WINDOW_S_MAX:.0f}")


def _check_id(name: str, value: str) -> None:
    if len(value) > ID_CHARS_MAX or not ID.match(value):
        raise ProtocolError(f"{name} is {value[:80]!r}, which is not an id")


def _check_number(name: str, value: int) -> None:
    if not 0 <= value < NUMBER_END:
        raise ProtocolError(f"{name} is {value}; it must be between 0 and 2^53")
