"""A batch of reports on its way into the store, each with its origin.

A report belongs to the minute in which its window ended, by the device's clock. In three cases, the report belongs to
the minute of its receipt: the device reports that its clock is not synchronized, the device's clock is more than
TRUSTED_AHEAD_S ahead, or the store no longer keeps reports of that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edgert.telemetry.messages import HistMessage, MetricsMessage
from edgert_deploy.fleet.reports import EventMessage, Report

MINUTE_MS = 60_000
HOUR_MIN = 60
TRUSTED_AHEAD_S = 300
KEEP_WINDOWS_H = 72
PIECE_MAX = 4_000


@dataclass(frozen=True)
class Origin:
    """The device of a report, and the time of its receipt (`at_ms`, in ms since 1970)."""

    site: str
    device: str
    at_ms: int
    model: str = ""


@dataclass
class Batch:
    """The messages since the last write."""

    hists: list[tuple[Origin, HistMessage]] = field(default_factory=list)
    metrics: list[tuple[Origin, MetricsMessage]] = field(default_factory=list)
    events: list[tuple[Origin, EventMessage]] = field(default_factory=list)
    # The newest of `status`, `info`, `sys`, `deploy` and `profile`, by (site, device).
    devices: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    heard_ms: dict[tuple[str, str], int] = field(default_factory=dict)

    def pieces(self) -> Iterator[Batch]:
        """Yield the batch in parts. Small parts limit the memory that a write takes."""
        yield Batch(events=self.events, devices=self.devices, heard_ms=self.heard_ms)
        for start in range(0, max(len(self.hists), len(self.metrics)), PIECE_MAX):
            part = slice(start, start + PIECE_MAX)
            yield Batch(self.hists[part], self.metrics[part])

    @property
    def reports(self) -> int:
        return len(self.hists) + len(self.metrics) + len(self.events)

    def __len__(self) -> int:
        return self.reports + len(self.devices)


def trusted_ms(ts_ms: int, now_ms: int) -> int:
    """Return `ts_ms`, the time by a device's clock, if it is plausible at `now_ms`; else `now_ms`."""
    trusted = now_ms - KEEP_WINDOWS_H * HOUR_MIN * MINUTE_MS < ts_ms < now_ms + TRUSTED_AHEAD_S * 1000
    return ts_ms if trusted else now_ms


def report_time_ms(origin: Origin, report: Report) -> int:
    """Return the time to which the store assigns a report (see the module's docstring)."""
    return trusted_ms(report.ts_ms, origin.at_ms) if report.clock_synced else origin.at_ms


def minute_of(origin: Origin, report: Report) -> int:
    return report_time_ms(origin, report) // MINUTE_MS
