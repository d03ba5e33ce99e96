"""What was heard, on its way into the store: reports with where and when they came, a batch at a time.

A report belongs to the minute in which its window ended by the device's clock. A clock that is off by more than
TRUSTED_AHEAD_S into the future, or further back than the windows are kept, is not believed: the time of receipt
counts instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from edgert.telemetry.messages import HistMessage, MetricsMessage
from edgert_deploy.fleet.reports import EventMessage

MINUTE_MS = 60_000
HOUR_MIN = 60
TRUSTED_AHEAD_S = 300
KEEP_WINDOWS_H = 72
PIECE_MAX = 4_000


@dataclass(frozen=True)
class Heard:
    """One report as it came. `at_ms` is when, in ms since 1970."""

    site: str
    device: str
    at_ms: int
    model: str = ""


@dataclass
class Batch:
    """What came since the last write."""

    hists: list[tuple[Heard, HistMessage]] = field(default_factory=list)
    metrics: list[tuple[Heard, MetricsMessage]] = field(default_factory=list)
    events: list[tuple[Heard, EventMessage]] = field(default_factory=list)
    # The newest of `status`, `info`, `sys`, `deploy` and `profile`, by (site, device).
    devices: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    heard_ms: dict[tuple[str, str], int] = field(default_factory=dict)

    def pieces(self) -> Iterator[Batch]:
        """The same in parts, so that what a write takes in memory has a bound."""
        yield Batch(events=self.events, devices=self.devices, heard_ms=self.heard_ms)
        for start in range(0, max(len(self.hists), len(self.metrics)), PIECE_MAX):
            part = slice(start, start + PIECE_MAX)
            yield Batch(self.hists[part], self.metrics[part])

    def __len__(self) -> int:
        return len(self.hists) + len(self.metrics) + len(self.events) + len(self.devices)


@dataclass(frozen=True)
class Written:
    """What a batch came to."""

    hists: int
    metrics: int
    events: int
    duplicates: int

    @classmethod
    def sum(cls, parts: Iterable[Written]) -> Written:
        numbers = [(part.hists, part.metrics, part.events, part.duplicates) for part in parts]
        return cls(*(sum(column) for column in zip(*numbers, strict=True)))


def trusted_ms(ts_ms: int, now_ms: int) -> int:
    """`ts_ms`, a device's own time, where it can be believed at `now_ms`; else `now_ms`."""
    trusted = now_ms - KEEP_WINDOWS_H * HOUR_MIN * MINUTE_MS < ts_ms < now_ms + TRUSTED_AHEAD_S * 1000
    return ts_ms if trusted else now_ms


def minute_of(heard: Heard, ts_ms: int) -> int:
    return trusted_ms(ts_ms, heard.at_ms) // MINUTE_MS
