"""The fleet as it stands now, small enough for many devices: what the page's map, lists and stages show. Pure.

Theory of operation: a device is a few words and, for each model, one line; percentiles over time are not kept here
but asked from the store (history.py). A device's state is worked out when it is asked for, as silence is not told
by any message. Every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from edgert.errors import ProtocolError
from edgert.names import ID
from edgert.telemetry import messages
from edgert.telemetry.messages import MetricsMessage, Scalar, Topic, parse_topic
from edgert_deploy.fleet.reports import KINDS, EventMessage, parse_report, storable, stream_of
from edgert_deploy.fleet.state import MODELS_PER_DEVICE_MAX, STALE_AFTER_WINDOWS, WINDOW_S_DEFAULT, note_alarm
from edgert_deploy.fleet.store.batch import trusted_ms
from edgert_deploy.fleet.store.store import PROFILE_UNKNOWN
from edgert_deploy.fleet.stream_limit import StreamLimit

DEVICES_MAX = 50_000
VERSIONS_MAX = 10_000
GONE_AFTER_WINDOWS = 10  # a model that says nothing while others of its device do was taken away
LATE_S = 300.0  # reports that are older than that when they come: the device works off what it kept
# The steps of a request, in their order, and the field of `metrics` that holds each one's p99 of the window.
STAGES = ("decode", "preprocess", "cache", "queue", "engine", "postprocess", "encode")
# Worst first: a device is in the first of them that fits.
STATES = ("lost", "offline", "silent", "alarmed", "behind", "online")
LETTERS = {"lost": "l", "offline": "f", "silent": "s", "alarmed": "a", "behind": "b", "online": "o"}
ATTENTION = STATES[:-1]


@dataclass(frozen=True)
class Filter:
    """Which devices: an empty word stands for any."""

    site: str = ""
    model: str = ""
    version: str = ""
    profile: str = ""

    def where(self) -> dict[str, str]:
        """As FleetQuery takes it."""
        return {name: value for name, value in vars(self).items() if value}


@dataclass(slots=True)
class Line:
    """One model on one device, as its last report has it. `stages_ms` are its own p99s of that window."""

    version: str = ""
    ts_ms: int = 0
    window_s: float = WINDOW_S_DEFAULT
    stages_ms: tuple[float, ...] = ()
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    per_s: float | None = None
    requests: int = 0
    errors: int = 0
    batch_mean: float = 0.0
    rss_bytes: int = 0
    alarms: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Held:
    """One device. `heard_at` and `known_since` are monotonic seconds, `alarms_ms` is since 1970."""

    site: str
    device: str
    known_since: float
    status: str = "unknown"
    heard_at: float | None = None
    window_s: float = WINDOW_S_DEFAULT
    late_s: float = 0.0
    profile: str = PROFILE_UNKNOWN
    alarms_ms: int = 0
    lines: dict[str, Line] = field(default_factory=dict)
    alarms: set[str] = field(default_factory=set)
    said: dict[str, Mapping[str, Scalar]] = field(default_factory=dict)  # `info`, `sys` and `deploy`, the newest


@dataclass(frozen=True)
class Seen:
    """A device's state, why, and since when (ms since 1970; 0 where nobody knows)."""

    held: Held
    state: str
    why: str
    since_ms: int
    alarms: tuple[str, ...]


class Board:
    """What every device last said. `clock` is monotonic seconds, `wall_ms` ms since 1970; both are passed in."""

    def __init__(self) -> None:
        self.refused = self.reports = self.events = 0
        self.last_refusal = ""
        self._devices: dict[tuple[str, str], Held] = {}
        # When each version of a model was first heard of: since then devices with an older one are behind.
        self._versions: dict[str, dict[str, int]] = {}
        self._limit = StreamLimit()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._devices)

    # --- what is heard ----------------------------------------------------------------------

    def remember(self, devices: Iterable[Mapping[str, Any]], now: float, wall_ms: int) -> None:
        """Take in what a store knew before this began (FleetQuery.devices): so silence has a beginning."""
        with self._lock:
            for row in devices:
                held = self._held(row["site"], row["device"], now)
                held.status, held.profile = row["status"], row["profile"]
                if row["heard_ms"]:
                    held.heard_at = now - max(0, wall_ms - row["heard_ms"]) / 1000
                held.said.update({name: row[name] for name in ("info", "sys", "deploy") if row[name]})

    def remember_versions(self, seen: Iterable[tuple[str, str, int]]) -> None:
        """(model, version, when first heard of), as a store has them."""
        with self._lock:
            for model, version, at_ms in seen:
                self._note_version(model, version, at_ms)

    def remember_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Events as FleetQuery.events gives them, newest first: alarms that were raised before this began."""
        with self._lock:
            for said in reversed(events):
                held = self._devices.get((said["site"], said["device"]))
                if held is not None:
                    _note_event(held, str(said.get("event", "")), said.get("model"), said.get("alarm"), said["at_ms"])

    def apply(self, topic: str, payload: bytes, retained: bool, now: float, wall_ms: int) -> None:
        """Take one message in; what is not of the contract is counted."""
        try:
            parsed = parse_topic(topic)
            with self._lock:
                self._apply(parsed, payload, retained, now, wall_ms)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic[:120]}: {error.message}"

    def _apply(self, topic: Topic, payload: bytes, retained: bool, now: float, wall_ms: int) -> None:
        if topic.kind == "hist":
            self.reports += 1  # the store answers for its contents; here it only says that there is news
            return
        held = self._held(topic.site, topic.device, now)
        if topic.kind == "status":
            held.status = messages.parse_status(payload)
        elif topic.kind in KINDS:
            report = parse_report(topic, payload)
            self._limit.check(topic.site, topic.device, stream_of(topic, report), now)
            if isinstance(report, EventMessage):
                self.events += 1
                _note_event(held, report.event, report.model, report.alarm, trusted_ms(report.ts_ms, wall_ms))
            elif isinstance(report, MetricsMessage):
                assert topic.model is not None
                self._apply_metrics(held, topic.model, report, wall_ms)
        else:
            fields = messages.load(payload)
            held.said[topic.kind] = fields
            if topic.kind == "info" and isinstance(profile := fields.get("profile"), str):
                held.profile = intern(storable(profile))
        if not retained:
            held.heard_at = now

    def _apply_metrics(self, held: Held, model: str, said: MetricsMessage, wall_ms: int) -> None:
        line = held.lines.get(model)
        if line is None:
            if len(held.lines) >= MODELS_PER_DEVICE_MAX:
                raise ProtocolError(f"device {held.device} reports more than {MODELS_PER_DEVICE_MAX} models")
            line = held.lines[intern(model)] = Line()
        if said.ts_ms <= line.ts_ms <= wall_ms:
            return  # one that came late or again
        self.reports += 1
        requests = int(said.number("req_total"))
        line.per_s = _per_s(line, requests, said)
        held.window_s = max(said.window_s, 1.0)
        synced = said.fields.get("clock_synced", 1)
        held.late_s = max(0.0, (wall_ms - said.ts_ms) / 1000) if synced else 0.0
        line.version, line.ts_ms, line.window_s = intern(said.model_version), said.ts_ms, said.window_s
        line.stages_ms = tuple(said.number(f"{stage}_p99_ms") for stage in STAGES)
        line.p50_ms, line.p99_ms = said.number("lat_p50_ms"), said.number("lat_p99_ms")
        line.requests, line.errors = requests, int(said.number("err_total"))
        line.batch_mean, line.rss_bytes = said.number("batch_mean"), int(said.number("rss_bytes"))
        gone_ms = said.ts_ms - GONE_AFTER_WINDOWS * held.window_s * 1000
        for name in [name for name, other in held.lines.items() if 0 < other.ts_ms < gone_ms and not other.alarms]:
            del held.lines[name]
        self._note_version(
            model, line.version, trusted_ms(said.ts_ms, wall_ms) if held.late_s < LATE_S and synced else wall_ms
        )

    def _note_version(self, model: str, version: str, at_ms: int) -> None:
        seen = self._versions.setdefault(model, {})
        if version and (version in seen or len(seen) < VERSIONS_MAX):
            seen[version] = min(seen.get(version, at_ms), at_ms)

    def _held(self, site: str, device: str, now: float) -> Held:
        key = (site, device)
        held = self._devices.get(key)
        if held is None:
            if len(self._devices) >= DEVICES_MAX:
                raise ProtocolError(f"more than {DEVICES_MAX} devices; give each page one site with --site")
            held = self._devices[key] = Held(intern(site), device, known_since=now)
        return held

    # --- what is shown ----------------------------------------------------------------------

    def seen(self, chosen: Filter, now: float, wall_ms: int) -> list[Seen]:
        """The devices that `chosen` fits, ordered by site and name, each with its state."""
        with self._lock:
            newest = self._newest(now)
            ordered = [self._devices[key] for key in sorted(self._devices)]
            return [self._seen(held, newest, now, wall_ms) for held in ordered if _fits(held, chosen)]

    def device(self, site: str, device: str, now: float, wall_ms: int) -> Seen | None:
        with self._lock:
            held = self._devices.get((site, device))
            return None if held is None else self._seen(held, self._newest(now), now, wall_ms)

    def words(self) -> dict[str, list[str]]:
        """All that may be filtered by."""
        with self._lock:
            held = list(self._devices.values())
            versions = {
                (model, line.version) for each in held for model, line in list(each.lines.items()) if line.version
            }
        return {
            "site": sorted({each.site for each in held}),
            "profile": sorted({each.profile for each in held}),
            "model": sorted({model for model, _ in versions}),
            "version": sorted({version for _, version in versions}, key=release, reverse=True),
        }

    def numbers(self, model: str) -> dict[str, int]:
        """A number for each version of `model` that was heard of: what a version's colour follows, however it is filtered."""
        with self._lock:
            return {
                version: number for number, version in enumerate(sorted(self._versions.get(model, ()), key=release))
            }

    def stages(self, chosen: Filter) -> list[dict[str, Any]]:
        """For each model and version, each stage's p99 of the last window over the devices: the middle and the slowest.

        Stages come as percentiles, which cannot be merged: these are statements about devices, not about requests.
        """
        found: dict[tuple[str, str], list[tuple[Held, Line]]] = {}
        with self._lock:
            for held in self._devices.values():
                for model, line in held.lines.items():
                    if _fits(held, chosen) and line_fits(model, line, chosen) and line.stages_ms:
                        found.setdefault((model, line.version), []).append((held, line))
        return [
            {"model": model, "version": version, "devices": len(lines), "stages": [_stage(lines, n) for n in range(len(STAGES))]}
            for (model, version), lines in sorted(found.items(), key=lambda item: (item[0][0], release(item[0][1])))
        ]  # fmt: skip

    def _newest(self, now: float) -> dict[str, tuple[str, int]]:
        """Each model's newest version that an answering device serves, and since when it is known."""
        newest: dict[str, str] = {}
        for held in self._devices.values():
            if held.status in ("lost", "offline") or _is_silent(held, now):
                continue  # what was taken back elsewhere is no longer what others lack
            for model, line in held.lines.items():
                if line.version and release(line.version) > release(newest.get(model, "")):
                    newest[model] = line.version
        return {model: (version, self._versions.get(model, {}).get(version, 0)) for model, version in newest.items()}

    def _seen(self, held: Held, newest: Mapping[str, tuple[str, int]], now: float, wall_ms: int) -> Seen:
        alarms = tuple(sorted(held.alarms.union(*(line.alarms for line in held.lines.values()))))
        heard_ms = 0 if held.heard_at is None else wall_ms - int((now - held.heard_at) * 1000)
        if held.status == "lost":
            return Seen(held, "lost", "the connection broke off", heard_ms, alarms)
        if held.status == "offline":
            return Seen(held, "offline", "stopped in good order", heard_ms, alarms)
        if _is_silent(held, now):
            return Seen(held, "silent", "says it is online, and sends nothing", heard_ms, alarms)
        if alarms:
            return Seen(held, "alarmed", ", ".join(alarms), held.alarms_ms, alarms)
        for model, line in sorted(held.lines.items()):
            version, since_ms = newest.get(model, ("", 0))
            if line.version and release(line.version) < release(version):
                return Seen(held, "behind", f"{model} is {line.version}, newest {version}", since_ms, alarms)
        if held.late_s > max(LATE_S, 5 * held.window_s):
            why = f"its reports come {held.late_s / 60:.0f} min late"
            return Seen(held, "behind", why, wall_ms - int(held.late_s * 1000), alarms)
        return Seen(held, "online", "", heard_ms, alarms)


def release(version: str) -> tuple[int, str]:
    """What versions are ordered by: `r12` is newer than `r9`."""
    number = version[1:] if version[:1] == "r" else ""
    return (int(number) if number.isdecimal() else -1, version)


def _is_silent(held: Held, now: float) -> bool:
    heard_at = held.known_since if held.heard_at is None else held.heard_at
    return now - heard_at > STALE_AFTER_WINDOWS * held.window_s


def _fits(held: Held, chosen: Filter) -> bool:
    if (chosen.site and held.site != chosen.site) or (chosen.profile and held.profile != chosen.profile):
        return False
    if not chosen.model and not chosen.version:
        return True
    return any(line_fits(model, line, chosen) for model, line in held.lines.items())


def line_fits(model: str, line: Line, chosen: Filter) -> bool:
    return chosen.model in ("", model) and chosen.version in ("", line.version)


def _per_s(line: Line, requests: int, said: MetricsMessage) -> float | None:
    """Requests a second in this window; None where the window before is not known."""
    grown = requests - line.requests
    if not line.ts_ms or grown < 0 or said.window_s <= 0 or said.ts_ms <= line.ts_ms:
        return line.per_s
    return grown / max(said.window_s, (said.ts_ms - line.ts_ms) / 1000)


def _note_event(held: Held, event: str, model: object, alarm: object, at_ms: int) -> None:
    named = alarm if isinstance(alarm, str) and ID.match(alarm) else "unnamed"
    line = held.lines.get(model) if isinstance(model, str) else None
    if line is None and isinstance(model, str) and ID.match(model) and len(held.lines) < MODELS_PER_DEVICE_MAX:
        line = held.lines[intern(model)] = Line()
    alarms = held.alarms if line is None else line.alarms
    before = len(alarms)
    note_alarm(alarms, event, named)
    if len(alarms) > before:
        held.alarms_ms = at_ms


def _stage(lines: Sequence[tuple[Held, Line]], number: int) -> dict[str, Any]:
    ordered = sorted(((line.stages_ms[number], held) for held, line in lines), key=lambda pair: pair[0])
    (middle_ms, _), (slowest_ms, slowest) = ordered[(len(ordered) - 1) // 2], ordered[-1]
    return {
        "stage": STAGES[number],
        "middle_ms": round(middle_ms, 4),
        "slowest_ms": round(slowest_ms, 4),
        "site": slowest.site,
        "device": slowest.device,
    }
