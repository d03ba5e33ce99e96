"""MQTT topics and flat-JSON payloads, which the device builds and subscribers parse.

docs/telemetry.md is the contract. Payloads are flat (no arrays, no objects), and booleans are 0 or 1. Every id contains
a letter, because exporters would turn the id `1.10` into the number 1.1.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgert.errors import ProtocolError
from edgert.names import ID, ID_CHARS_MAX, checked_id
from edgert.telemetry import stages
from edgert.telemetry.sketch import SCALE, Sketch
from edgert.telemetry.spans import SLO_BOUNDS_MS, WindowReport

VERSION = 1
ROOT = "edgert/v1"
HINT_ROOT = "edgert/hint"
PAYLOAD_BYTES_MAX = 64 * 1024
NUMBER_END = 2**63  # the limit of a number's magnitude: sums stay finite, and fit a database's column

Status = Literal["online", "offline", "lost"]
STATUSES: tuple[Status, ...] = ("online", "offline", "lost")
DEVICE_KINDS = ("status", "info", "sys", "event", "deploy")
MODEL_KINDS = ("metrics", "hist")
QOS = {"status": 1, "info": 1, "sys": 0, "metrics": 0, "hist": 1, "event": 1, "deploy": 1}

Scalar = str | int | float


def wall_ms() -> int:
    """Return the present time in ms since 1970."""
    return time.time_ns() // 1_000_000


class Topics:
    """The topics of one device. Raises ConfigInvalid for an id that cannot be part of a topic."""

    def __init__(self, site: str, device: str) -> None:
        self.site, self.device = checked_id("site", site), checked_id("device", device)
        self.status, self.info, self.sys, self.event, self.deploy = map(self._of_device, DEVICE_KINDS)

    def metrics(self, model: str) -> str:
        return self._of_device(f"m/{checked_id('model', model)}/metrics")

    def hist(self, model: str) -> str:
        return self._of_device(f"m/{checked_id('model', model)}/hist")

    @property
    def client_id(self) -> str:
        """The MQTT client id. It is unique, because no device id and no session id contains a colon."""
        return f"edgert-{self.site}:{self.device}"

    def _of_device(self, rest: str) -> str:
        return f"{ROOT}/{self.site}/{self.device}/{rest}"


def hint_topic(channel: str) -> str:
    """Return the topic of the retained hint that a channel has a new statement."""
    return f"{HINT_ROOT}/{checked_id('channel', channel)}"


@dataclass(frozen=True)
class Topic:
    """The parts of a topic. `model` is None for a topic of the whole device."""

    site: str
    device: str
    kind: str
    model: str | None = None


def parse_topic(topic: str) -> Topic:
    """Parse a topic. Raises ProtocolError for a topic that is not in the contract."""
    parts = topic.split("/")
    if "/".join(parts[:2]) == ROOT and all(len(part) <= ID_CHARS_MAX and ID.match(part) for part in parts[2:]):
        if len(parts) == 5 and parts[4] in DEVICE_KINDS:
            return Topic(parts[2], parts[3], parts[4])
        if len(parts) == 7 and parts[4] == "m" and parts[6] in MODEL_KINDS:
            return Topic(parts[2], parts[3], parts[6], parts[5])
    raise ProtocolError(f"topic {topic[:120]!r} is not one of {ROOT}/SITE/DEVICE/...; see docs/telemetry.md")


def subscriptions(site: str | None = None) -> tuple[str, ...]:
    """Return the topic filters for all messages of one site, or of all sites."""
    return (f"{ROOT}/{'+' if site is None else checked_id('site', site)}/#",)


def release_id(release: int) -> str:
    """Return a release number for the wire. The letter `r` makes exporters treat the number as a label."""
    return f"r{release}"


def dump(fields: Mapping[str, object]) -> bytes:
    """Return flat JSON in UTF-8, without fields that are None; booleans become 0 or 1.

    In a text, a lone surrogate, such as a byte of a path that is not UTF-8, becomes `?`. A nested value is a
    programmer's mistake.
    """
    flat: dict[str, Scalar] = {}
    for name, value in fields.items():
        if value is None:
            continue
        assert isinstance(value, (str, int, float)), f"{name} is {type(value).__name__}; payloads are flat"
        assert not isinstance(value, float) or math.isfinite(value), f"{name} is {value}"
        flat[name] = int(value) if isinstance(value, bool) else value
    return json.dumps(flat, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


_NESTED = frozenset((dict, list))


def load(payload: bytes) -> dict[str, Scalar]:
    """Parse a flat payload of a known version and keep unknown fields. Raises ProtocolError."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a payload has {len(payload)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a payload is not JSON: {payload[:60]!r}") from error
    # Compare exact types: json returns no subclasses, and this takes half the time.
    if type(fields) is not dict or not _NESTED.isdisjoint(map(type, fields.values())):
        raise ProtocolError(f"a payload is not a flat JSON object: {payload[:60]!r}")
    if fields.get("v") != VERSION:
        raise ProtocolError(f"a payload has v={fields.get('v')!r:.40}; this program reads v={VERSION}: update it")
    for name, value in fields.items():
        # Python's reader accepts NaN, Infinity and integers of thousands of digits, which subscribers cannot use.
        if (type(value) is float or type(value) is int) and not -NUMBER_END < value < NUMBER_END:
            raise _wrong(name, value, "a number within 2^63")
    return fields


# --- payloads, one function a kind ----------------------------------------------------------


def envelope(*, ts_ms: int, boot: str, seq: int | None = None) -> dict[str, Scalar]:
    """Return the first fields of every payload except `status`."""
    fields: dict[str, Scalar] = {"v": VERSION, "ts": ts_ms, "boot": checked_id("boot", boot)}
    return fields if seq is None else fields | {"seq": seq}


def metrics_fields(
    report: WindowReport, *, up: bool, model_version: str, facts: Mapping[str, object]
) -> dict[str, object]:
    """Return the `metrics` payload without its envelope.

    Without requests, a figure is None, which `dump` omits. `facts` may hold clock_synced, rss_bytes, temp_c and
    throttled.
    """
    totals, latency = report.totals, report.latency
    return {
        "window_s": round(report.window_s, 3),
        "uptime_s": round(report.uptime_s, 3),
        "up": up,
        "req_total": totals.requests,
        "err_total": totals.errors,
        "shed_total": totals.shed,
        "gone_total": totals.gone,
        "cache_hit_total": totals.cache_hits,
        "lat_p50_ms": _quantile(latency, 0.5),
        "lat_p95_ms": _quantile(latency, 0.95),
        "lat_p99_ms": _quantile(latency, 0.99),
        "lat_p999_ms": _quantile(latency, 0.999),
        "lat_max_ms": _quantile(latency, 1.0),
        "lat_sum_ms_total": round(totals.latency_sum_us / 1000, 3),
        **{f"lat_le_{bound}ms_total": n for bound, n in zip(SLO_BOUNDS_MS, totals.within_ms, strict=True)},
        **{f"{name}_p99_ms": _quantile(sketch, 0.99) for name, sketch in report.stages.items()},
        "batch_mean": round(report.batch_mean, 3) or None,
        **facts,
        "model_version": model_version,
    }


def hist_fields(report: WindowReport, *, model_version: str, clock_synced: object = None) -> dict[str, object]:
    """Return the `hist` payload without its envelope: latencies and stage times of answered requests."""
    sketch = report.latency
    return {
        "window_s": round(report.window_s, 3),
        "unit": "ms",
        "temporality": "delta",
        "scale": SCALE,
        "zero": sketch.zero,
        "count": sketch.count,
        "sum": round(sketch.sum, 6),
        "min": sketch.min,
        "max": sketch.max,
        "buckets": sketch.encode(),
        "stages": stages.text_of(report.stages),
        "clock_synced": clock_synced,
        "model_version": model_version,
    }


def _quantile(sketch: Sketch, share: float) -> float | None:
    """Return a percentile in ms; None if nothing was measured, because 0 would look like a measurement."""
    return round(sketch.quantile(share), 4) if sketch.count else None


def models_of(deploy: bytes) -> list[str]:
    """Return the models in a `deploy` payload. Raises ProtocolError."""
    return sorted(key.removesuffix("_state") for key in load(deploy) if key.endswith("_state"))


# --- the subscriber's side ------------------------------------------------------------------


@dataclass(frozen=True)
class _WindowMessage:
    ts_ms: int
    boot: str
    seq: int
    window_s: float
    model_version: str

    @staticmethod
    def _shared(fields: Mapping[str, Scalar]) -> dict[str, Any]:
        """Return the fields that reports share, by their names in the dataclasses. Raises ProtocolError."""
        return {
            "ts_ms": int_of(fields, "ts"),
            "boot": text_of(fields, "boot"),
            "seq": int_of(fields, "seq"),
            "window_s": float_of(fields, "window_s"),
            "model_version": text_of(fields, "model_version"),
        }


@dataclass(frozen=True)
class HistMessage(_WindowMessage):
    """One window's latencies of one model, ready to merge.

    `stages` are the stage times, packed by edgert.telemetry.stages; b"" if the device sent no valid stage times. If the
    stage times are invalid, `stages_fault` is the reason.
    """

    sketch: Sketch
    clock_synced: bool = True
    stages: bytes = b""
    stages_fault: str = ""

    @classmethod
    def from_json(cls, payload: bytes) -> HistMessage:
        """Read a message. Raises ProtocolError, also for latencies that cannot be merged with others."""
        fields = load(payload)
        shape = (fields.get("unit"), fields.get("temporality"), fields.get("scale"))
        if shape != ("ms", "delta", SCALE):
            raise ProtocolError(f"a histogram has unit, temporality, scale {shape}; expected ms, delta, {SCALE}")
        sketch = Sketch.decode(
            text_of(fields, "buckets"),
            zero=int_of(fields, "zero"),
            sum_ms=float_of(fields, "sum"),
            min_ms=float_of(fields, "min"),
            max_ms=float_of(fields, "max"),
        )
        if sketch.count != int_of(fields, "count"):
            raise ProtocolError(f"a histogram's buckets hold {sketch.count} values; its count is {fields['count']}")
        packed, fault = b"", ""
        try:
            packed = stages.packed_of(text_of(fields, "stages")) if "stages" in fields else b""
        except ProtocolError as error:  # the latencies are still valid
            fault = error.message
        return cls(
            **cls._shared(fields), sketch=sketch, clock_synced=is_synced(fields), stages=packed, stages_fault=fault
        )


@dataclass(frozen=True)
class MetricsMessage(_WindowMessage):
    """One window's figures of one model. `fields` has all figures, by their names on the wire."""

    fields: dict[str, Scalar]

    @classmethod
    def from_json(cls, payload: bytes) -> MetricsMessage:
        """Read a message. Raises ProtocolError."""
        fields = load(payload)
        return cls(**cls._shared(fields), fields=fields)

    @property
    def clock_synced(self) -> bool:
        return is_synced(self.fields)

    def number(self, name: str) -> float:
        """Return the field `name`, or 0 if the device did not send it as a number."""
        return self.reading(name) or 0

    def reading(self, name: str) -> float | None:
        """Return the field `name`; None if the device did not send it as a number."""
        value = self.fields.get(name)
        return value if isinstance(value, (int, float)) else None


def parse_status(payload: bytes) -> Status:
    """Return the status in a retained message. Raises ProtocolError."""
    text = payload[:16].decode(errors="replace")
    for status in STATUSES:
        if text == status:
            return status
    raise ProtocolError(f"a status is {text!r}; known: {', '.join(STATUSES)}")


def is_synced(fields: Mapping[str, Scalar]) -> bool:
    """Return False if the device reported that its clock follows no time source, else True."""
    return fields.get("clock_synced") != 0


def int_of(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "a whole number")
    return value


def float_of(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(name, value, "a finite number")
    return float(value)


def text_of(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"a payload has {name[:40]}={value!r:.40}; expected {expected}")
