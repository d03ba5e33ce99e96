"""Alarms: values of a window beyond a limit, with hysteresis against rapid changes at the limit.

Theory of operation: an alarm is raised when its reading is above its limit in RAISE_AFTER windows in a row. It is
cleared when its reading is below CLEAR_SHARE of the limit in CLEAR_AFTER windows in a row. A missing reading changes
nothing.

A p99 and an error share of few requests have no meaning. So windows are merged into a stretch, until the stretch
contains REQUESTS_MIN requests or STRETCH_WINDOWS_MAX windows. Each stretch gives one reading. After STRETCH_WINDOWS_MAX
windows without a request, each further window gives a reading of 0, because a model without requests has no further
failures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgert.config import AlarmConfig
from edgert.machine import process_mb
from edgert.telemetry.sketch import Sketch
from edgert.telemetry.spans import Totals, WindowReport

RAISED = "alarm_raised"  # the event of a raised alarm
CLEARED = "alarm_cleared"  # the event of a cleared alarm
RAISE_AFTER = 2
CLEAR_AFTER = 3
CLEAR_SHARE = 0.9
REQUESTS_MIN = 20
STRETCH_WINDOWS_MAX = 10
P99_FACTOR = 2.0  # if no limit of the p99 is configured, the limit is this multiple of the model's p95 target


@dataclass(frozen=True)
class Change:
    """An alarm that was raised or cleared. `value` is the reading, in the limit's unit."""

    alarm: str
    raised: bool
    value: float
    limit: float

    @property
    def event(self) -> str:
        return RAISED if self.raised else CLEARED

    def fields(self) -> dict[str, str | float]:
        return {"alarm": self.alarm, "value": round(self.value, 4), "limit": self.limit}


@dataclass
class _Alarm:
    limit: float
    raised: bool = False
    value: float = 0.0  # the newest reading
    streak: int = 0  # readings in a row that contradict `raised`


class Alarms:
    """The alarms of one model by name. A limit of 0 switches an alarm off."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._alarms = {name: _Alarm(limit) for name, limit in limits.items() if limit > 0}

    @classmethod
    def of(cls, config: AlarmConfig, p95_ms: float, worker_mb_max: float) -> Alarms:
        """Return the alarms of a model with the target `p95_ms` and the worker's memory limit (0: none)."""
        return cls(
            {
                "p99_ms": config.p99_ms or P99_FACTOR * p95_ms,
                "error_share": config.error_share,
                "temp_c": config.temp_c,
                "throttled": 0.5 if config.throttled else 0.0,
                "worker_mb": config.worker_mb or CLEAR_SHARE * worker_mb_max,
                "silent_s": config.silent_s,
            }
        )

    @property
    def raised(self) -> dict[str, float]:
        """The raised alarms with their newest readings."""
        return {name: alarm.value for name, alarm in self._alarms.items() if alarm.raised}

    def judge(self, readings: Mapping[str, float | None]) -> list[Change]:
        """Return the alarms that one window's readings raise or clear."""
        changes = []
        for name, alarm in self._alarms.items():
            value = readings.get(name)
            if value is None:
                continue
            alarm.value = value
            against = value < CLEAR_SHARE * alarm.limit if alarm.raised else value > alarm.limit
            alarm.streak = alarm.streak + 1 if against else 0
            if alarm.streak >= (CLEAR_AFTER if alarm.raised else RAISE_AFTER):
                alarm.raised, alarm.streak = not alarm.raised, 0
                changes.append(Change(name, alarm.raised, value, alarm.limit))
        return changes


class Readings:
    """Turns windows into readings; some readings need the previous window."""

    def __init__(self) -> None:
        self._before = Totals()
        self._silent_s = 0.0
        self._answered, self._requests = _Stretch(), _Stretch()

    def of(self, report: WindowReport, facts: Mapping[str, object]) -> dict[str, float | None]:
        """Return the readings for the alarms. `facts` may hold temp_c and throttled."""
        totals, before = report.totals, self._before
        self._before = totals
        requests = totals.requests - before.requests
        failed = totals.errors + totals.shed - before.errors - before.shed
        # A model that never had a request is not silent.
        self._silent_s = 0.0 if requests or not totals.requests else self._silent_s + report.window_s
        answered = self._answered.add(report.latency.count, latency=report.latency)
        recent = self._requests.add(requests, failed)
        return {
            "p99_ms": None if answered is None else answered.latency.quantile(0.99),
            "error_share": None if recent is None else recent.failed / max(recent.requests, 1),
            "temp_c": _number(facts.get("temp_c")),
            "throttled": _number(facts.get("throttled")),
            "worker_mb": process_mb(os.getpid()),  # PSS, like the daemon's limit: forks share much of their RSS
            "silent_s": self._silent_s,
        }


@dataclass
class _Stretch:
    """Consecutive windows, merged."""

    windows: int = 0
    requests: int = 0
    failed: int = 0
    latency: Sketch = field(default_factory=Sketch)

    def add(self, requests: int, failed: int = 0, latency: Sketch | None = None) -> _Stretch | None:
        """Add a window. If the stretch ends with this window, return the stretch and start the next one."""
        if requests and not self.requests:
            self.windows = 0  # drop earlier windows without requests
        self.windows += 1
        self.requests += requests
        self.failed += failed
        self.latency.merge(latency or Sketch())
        if self.requests < REQUESTS_MIN and self.windows < STRETCH_WINDOWS_MAX:
            return None
        ended = replace(self)
        # Without a request, the stretch does not start again: each further window gives a reading.
        self.windows = 0 if self.requests else self.windows
        self.requests = 0
        self.failed = 0
        self.latency = Sketch()
        return ended


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
