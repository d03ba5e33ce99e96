"""Decides which reports are new, and by how much their counters grew.

This module does no I/O. If the broker does not acknowledge a report, the device sends it again. So every stream
remembers the sequence numbers that arrived. Counters are totals of a worker. The exporter adds only their growth since
the newest earlier report.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from edgert.telemetry.messages import MetricsMessage, Topic
from edgert_deploy.fleet.reports import EventMessage, Report, counters_of, increase
from edgert_deploy.fleet.sequence import StreamTracker, is_new_spool

STREAMS_MAX = 500_000

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass
class _Counted:
    """The newest report whose counters were added."""

    boot: str
    seq: int
    counters: tuple[int, ...]


class Counting:
    """The streams of a fleet's reports. Beyond STREAMS_MAX, the stream with the oldest report is dropped."""

    def __init__(self) -> None:
        self.duplicates = 0
        self._numbers: OrderedDict[tuple[str, str, str, str], StreamTracker] = OrderedDict()
        self._counters: OrderedDict[tuple[str, ...], _Counted] = OrderedDict()

    @property
    def missing(self) -> int:
        """The minimum number of histograms and events that were sent and never arrived."""
        return sum(self.missing_by_device().values())

    def missing_by_device(self) -> dict[tuple[str, str], int]:
        """Return `missing` for each (site, device) with missing reports."""
        missing: Counter[tuple[str, str]] = Counter()
        for (kind, site, device, _), numbers in self._numbers.items():
            if kind != "metrics" and (lost := numbers.lost_min):
                missing[site, device] += lost
        return missing

    @property
    def streams(self) -> int:
        return len(self._numbers)

    def is_new(self, topic: Topic, report: Report) -> bool:
        """Remember a report; return whether it is new."""
        # All events of a device share one sequence of numbers.
        model = "" if isinstance(report, EventMessage) else topic.model or ""
        numbers = _get_or_create(self._numbers, (topic.kind, topic.site, topic.device, model), StreamTracker)
        new = numbers.is_new(report.boot, report.seq)
        self.duplicates += not new
        return new

    def increase(self, topic: Topic, report: MetricsMessage) -> tuple[int, ...]:
        """Return by how much a new report increases the counters.

        The increase of a late report is 0, because a newer report has already included it.
        """
        counters = counters_of(report)
        key = (topic.site, topic.device, topic.model or "")
        last = _get_or_create(self._counters, key, lambda: _Counted("", -1, ()))
        same_boot = last.boot == report.boot
        new_spool = same_boot and is_new_spool(report.seq, last.seq)
        if same_boot and report.seq <= last.seq and not new_spool:
            return (0,) * len(counters)
        grown = increase(counters, last.counters if same_boot else None, report, new_spool)
        self._counters[key] = _Counted(report.boot, report.seq, counters)
        return grown


def _get_or_create(values: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return the value of `key`; create a missing value. The key becomes the most recently used key."""
    value = values.get(key)
    if value is None:
        value = values[key] = make()
        if len(values) > STREAMS_MAX:
            values.popitem(last=False)
    else:
        values.move_to_end(key)
    return value
