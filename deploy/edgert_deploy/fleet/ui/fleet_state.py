"""The fleet's present state, for the page's map and lists.

This module does no I/O. Theory of operation: the store provides percentiles over time (history.py). This module knows
the newest messages. A device's state is computed at each request, because no message announces that a device becomes
stale. Any thread may call any method.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgert.telemetry.messages import HistMessage, MetricsMessage, Scalar, Topic
from edgert_deploy.fleet.live_fleet import DeviceState, Fleet, ReportedModel
from edgert_deploy.fleet.reports import EventMessage
from edgert_deploy.fleet.store.batch import trusted_ms
from edgert_deploy.fleet.store.recorder import REMOVED
from edgert_deploy.fleet.ui.slow_devices import SlowDevices

DEVICES_MAX = 50_000
VERSIONS_MAX = 10_000
GONE_AFTER_WINDOWS = 10  # a model that misses more windows than this on a reporting device is treated as removed
LATE_S = 300.0  # a report that arrives later than this was in the device's spool
# The worst state comes first. A device has the first state that applies.
STATES = ("lost", "offline", "stale", "alarmed", "slow", "behind", "online")
LETTERS = {"lost": "l", "offline": "f", "stale": "s", "alarmed": "a", "slow": "w", "behind": "b", "online": "o"}
ATTENTION = STATES[:-1]


@dataclass(frozen=True)
class Filter:
    """A filter of devices. An empty field matches any value."""

    site: str = ""
    model: str = ""
    version: str = ""
    profile: str = ""

    def where(self) -> dict[str, str]:
        """Return the filter in the form that FleetQuery accepts."""
        return {name: value for name, value in vars(self).items() if value}


@dataclass(frozen=True)
class DeviceView:
    """A device's state, the reason for the state, and its start (ms since 1970; 0 if unknown)."""

    device: DeviceState
    state: str
    why: str
    since_ms: int
    alarms: tuple[str, ...]


class FleetState(Fleet):
    """Every device and its state. `now` is monotonic seconds; `wall_ms` returns ms since 1970."""

    decodes_hist = False  # the store provides latencies; here, histograms are only counted

    def __init__(self, wall_ms: Callable[[], int], targets: Mapping[str, float] | None = None) -> None:
        super().__init__(wall_ms, DEVICES_MAX)
        self.reports = self.events = 0
        self._slow = SlowDevices(targets or {})
        # The time of the first report of each version. Since this time, devices with an older version are behind.
        self._versions: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    # --- messages ---------------------------------------------------------------------------

    def load_devices(self, devices: Iterable[Mapping[str, Any]], now: float) -> None:
        """Load the devices of a store (FleetQuery.devices), so that the page knows when a device became stale."""
        with self._lock:
            for row in devices:
                if row["status"] == REMOVED:
                    continue
                device = self.device(Topic(row["site"], row["device"], "status"), now)
                device.status = row["status"]
                if row["heard_ms"]:
                    device.heard_at = now - max(0, self._wall_ms() - row["heard_ms"]) / 1000
                for kind in ("info", "sys", "deploy"):
                    if row[kind]:
                        self.on_fields(Topic(row["site"], row["device"], kind), row[kind], now)
                device.profile = row["profile"]

    def load_versions(self, seen: Iterable[tuple[str, str, int]]) -> None:
        """Load (model, version, time of the first report) from a store."""
        with self._lock:
            for model, version, at_ms in seen:
                self._note_version(model, version, at_ms)

    def load_baselines(self, usual_ms: Mapping[tuple[str, str], float]) -> None:
        """Load the usual p99 of each (model, profile) from a store."""
        with self._lock:
            self._slow.usual_ms = usual_ms

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        with self._lock:
            super().apply(topic, payload, retained, now)

    def on_fields(self, topic: Topic, fields: Mapping[str, Scalar], now: float) -> None:
        super().on_fields(topic, fields, now)
        self.device(topic, now).fields[topic.kind] = fields

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        self.reports += 1

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        self.events += 1

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        self.reports += 1
        super().on_metrics(topic, metrics, now)
        name, device, wall_ms = topic.model or "", self.device(topic, now), self._wall_ms()
        if device.models[name].ts_ms != metrics.ts_ms:
            return  # a late report
        gone_ms = metrics.ts_ms - GONE_AFTER_WINDOWS * device.window_s * 1000
        for gone in [model for model, line in device.models.items() if 0 < line.ts_ms < gone_ms]:
            del device.models[gone]
        on_time = device.late_s < LATE_S and metrics.fields.get("clock_synced", 1)
        at_ms = trusted_ms(metrics.ts_ms, wall_ms) if on_time else wall_ms
        self._note_version(name, device.models[name].version, at_ms)

    def _note_version(self, model: str, version: str, at_ms: int) -> None:
        seen = self._versions.setdefault(model, {})
        if version and (version in seen or len(seen) < VERSIONS_MAX):
            seen[version] = min(seen.get(version, at_ms), at_ms)

    # --- the page -----------------------------------------------------------------------------

    def views(self, chosen: Filter, now: float) -> list[DeviceView]:
        """Return the devices that match the filter, with their states, ordered by site and name."""
        with self._lock:
            self._slow.compare(self.devices.values(), now)
            newest = self._newest(now)
            ordered = [self.devices[key] for key in sorted(self.devices)]
            return [self._state_of(device, newest, now) for device in ordered if _device_fits(device, chosen)]

    def view_of(self, site: str, device: str, now: float) -> DeviceView | None:
        """Return one device with its state; None if the device is unknown."""
        with self._lock:
            self._slow.compare(self.devices.values(), now)
            state = self.devices.get((site, device))
            return None if state is None else self._state_of(state, self._newest(now), now)

    def filter_values(self) -> dict[str, list[str]]:
        """Return the possible values of each field of a filter."""
        with self._lock:
            devices = list(self.devices.values())
            versions = {
                (model, line.version)
                for device in devices
                for model, line in list(device.models.items())
                if line.version
            }
        return {
            "site": sorted({device.site for device in devices}),
            "profile": sorted({device.profile for device in devices}),
            "model": sorted({model for model, _ in versions}),
            "version": sorted({version for _, version in versions}, key=release, reverse=True),
        }

    def device_names(self) -> set[str]:
        with self._lock:
            return {device.device for device in self.devices.values()}

    def count_models(self, chosen: Filter) -> int:
        with self._lock:
            fitting = (device for device in self.devices.values() if _device_fits(device, chosen))
            return sum(line_fits(model, line, chosen) for device in fitting for model, line in device.models.items())

    def numbers(self, model: str) -> dict[str, int]:
        """Return a number for each version of `model`, which gives its colour on the page with any filter."""
        with self._lock:
            return {
                version: number for number, version in enumerate(sorted(self._versions.get(model, ()), key=release))
            }

    def _newest(self, now: float) -> dict[str, tuple[str, int]]:
        """Return each model's newest version on reporting devices, and the time of the version's first report."""
        newest: dict[str, str] = {}
        for device in self.devices.values():
            if device.status in ("lost", "offline") or device.is_stale(now):
                continue  # a silent device may still have a version that the fleet rolled back
            for model, line in device.models.items():
                if line.version and release(line.version) > release(newest.get(model, "")):
                    newest[model] = line.version
        return {model: (version, self._versions.get(model, {}).get(version, 0)) for model, version in newest.items()}

    def _state_of(self, device: DeviceState, newest: Mapping[str, tuple[str, int]], now: float) -> DeviceView:
        wall_ms = self._wall_ms()
        alarms = tuple(sorted(set().union(*device.alarms.values())))
        heard_ms = 0 if device.heard_at is None else wall_ms - int((now - device.heard_at) * 1000)
        if device.status == "lost":
            return DeviceView(device, "lost", "its connection broke", heard_ms, alarms)
        if device.status == "offline":
            return DeviceView(device, "offline", "stopped", heard_ms, alarms)
        if device.is_stale(now):
            return DeviceView(device, "stale", "online, but sends nothing", heard_ms, alarms)
        if alarms:
            return DeviceView(device, "alarmed", ", ".join(alarms), device.alarms_ms, alarms)
        if slow := self._slow.why(device, wall_ms):
            return DeviceView(device, "slow", *slow, alarms)
        for model, line in sorted(device.models.items()):
            version, since_ms = newest.get(model, ("", 0))
            if line.version and release(line.version) < release(version):
                return DeviceView(device, "behind", f"{model} is {line.version}, newest {version}", since_ms, alarms)
        if device.late_s > max(LATE_S, 5 * device.window_s):
            why = f"its reports are {device.late_s / 60:.0f} min late"
            return DeviceView(device, "behind", why, wall_ms - int(device.late_s * 1000), alarms)
        return DeviceView(device, "online", "", heard_ms, alarms)


def release(version: str) -> tuple[int, str]:
    """Return the sort key of a version: `r12` sorts after `r9`."""
    number = version[1:] if version[:1] == "r" else ""
    return (int(number) if number.isdecimal() else -1, version)


def _device_fits(device: DeviceState, chosen: Filter) -> bool:
    if (chosen.site and device.site != chosen.site) or (chosen.profile and device.profile != chosen.profile):
        return False
    if not chosen.model and not chosen.version:
        return True
    return any(line_fits(model, line, chosen) for model, line in device.models.items())


def line_fits(model: str, line: ReportedModel, chosen: Filter) -> bool:
    return chosen.model in ("", model) and chosen.version in ("", line.version)
