"""Queries of the store: percentiles over any period and any grouping, merged exactly.

Theory of operation: a query reads rows of hours for the whole hours of its period, and rows of minutes for the two
ends. A query without devices reads rows of groups, whose number does not depend on the size of the fleet. A query that
filters or groups by device reads one row for each hour and stream, and windows at the two ends. Periods begin and end
at whole minutes. A beginning or an end that is more than FINE_HOURS ago moves to a whole hour.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.packed_histograms import (
    MERGED_FORM,
    WINDOW_FORM,
    DamagedData,
    HistogramPool,
    StageCounts,
    cells_of,
)
from edgert_deploy.fleet.reports import DIMENSIONS, PROFILE_UNKNOWN, check_dimensions
from edgert_deploy.fleet.store import database, gaps, schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from edgert_deploy.fleet.store.schema import COUNTERS
from edgert_deploy.fleet.store.store import FINE_HOURS

FAILED = ("rolled_back", "refused")  # the events of a device that did not keep a release
STEPS_MAX = 2_000
EVENTS_MAX = 10_000
GROUPS_MAX = 100_000  # the maximum number of groups of an answer, over all steps: merging takes 8 KB for each group
STAGE_GROUPS_MAX = 12_500  # the same limit for an answer with stages, which take 54 KB more for each group
_FETCHED_AT_ONCE = 20_000
# A database searches once for each key. If there are more keys than this limit, filtering in Python is faster.
_KEYS_MAX = 50


@dataclass(frozen=True)
class Question:
    """A question to the store.

    Attributes:
        since_ms, until_ms: The period, in ms since 1970.
        by: The dimensions to group by.
        where: The filter: the dimensions to filter by, with the value of each.
        step_min: The length of a step, in minutes; 0 makes the whole period one step.
        stages: Whether the answers have the time of each stage.
    """

    since_ms: int
    until_ms: int
    by: tuple[str, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)
    step_min: int = 0
    stages: bool = False

    def __post_init__(self) -> None:
        check_dimensions((*self.by, *self.where))
        if self.until_ms <= self.since_ms:
            raise ConfigInvalid("the period ends before it starts: give an earlier start or a later end")
        if self.step_min and (self.until_ms - self.since_ms) / MINUTE_MS / self.step_min > STEPS_MAX:
            raise ConfigInvalid(f"steps of {self.step_min} min make more than {STEPS_MAX} steps: choose longer steps")

    @property
    def names_devices(self) -> bool:
        return "device" in (*self.by, *self.where)


@dataclass(frozen=True)
class Answer:
    """The merged windows of one group in one step.

    Attributes:
        group: The values of the dimensions that the question groups by.
        start_ms: The start of the step, or of the period if the question has no steps.
        duration_s: The length of the step.
        counters: The growth of each counter.
        missing: The number of reports of each device (SITE/DEVICE) that were sent and never arrived.
        stages: The times of the stages; None if the question or the devices' reports have no stages.
    """

    group: dict[str, str]
    start_ms: int
    duration_s: float
    latency: Sketch
    windows: int
    counters: dict[str, int]
    missing: dict[str, int]
    stages: StageCounts | None = None


@dataclass(frozen=True)
class _Part:
    """Rows of one table: the time bins from `first` to before `end`. A time bin has `minutes` minutes."""

    table: sa.Table
    time_bin: sa.Column[Any]
    first: int
    end: int
    minutes: int


def period_ms(question: Question, now_ms: int) -> tuple[int, int]:
    """Return the period that an answer covers: the question's period, extended to whole minutes or hours."""
    first, end = _minutes_of(question, now_ms)
    return first * MINUTE_MS, end * MINUTE_MS


class FleetQuery:
    """One process's connection to the store, for reading. Raises ConfigInvalid or StoreFailed."""

    def __init__(self, url: str) -> None:
        self._database = database.OpenStore(url, writes=False)

    def close(self) -> None:
        self._database.close()

    @property
    def store(self) -> str:
        """The store's URL without its password."""
        return self._database.name

    def answer(self, question: Question, now_ms: int) -> list[Answer]:
        """Return an answer for each group and step with reports, ordered by group, then by time.

        Raises ConfigInvalid if there are too many groups.
        """
        first, end = _minutes_of(question, now_ms)
        builder = _AnswerBuilder(question, first, end)
        with self._database.transaction() as connection:
            for part in _parts(question, first, end):
                _read_rows(connection, question, part, builder)
            _read_gaps(connection, question, first, end, builder)
        with database.translated(self._database.engine):
            return builder.answers()

    def newest_ms(self) -> int:
        """Return when the newest message of any device was stored; 0 in an empty store."""
        with self._database.transaction() as connection:
            return int(connection.scalar(sa.select(sa.func.max(schema.device.c.heard_ms))) or 0)

    def minutes_from_ms(self, of_devices: bool) -> int | None:
        """Return the time of the oldest rows of minutes, of devices or of groups; None without such rows."""
        column = schema.hist_window.c.minute if of_devices else schema.group_minute.c.time_bin
        with self._database.transaction() as connection:
            oldest = connection.scalar(sa.select(sa.func.min(column)))
        return None if oldest is None else int(oldest) * MINUTE_MS

    def unsynced(self, question: Question, now_ms: int) -> list[str]:
        """Return the devices (SITE/DEVICE) whose clock was not synchronized for at least one stored window.

        The store files such a window under the time of its receipt.
        """
        first, end = _minutes_of(question, now_ms)
        table = schema.hist_window
        query = (
            sa.select(table.c.stream)
            .distinct()
            .where(table.c.clock_synced == 0, table.c.minute >= first, table.c.minute < end)
        )
        with self._database.transaction() as connection:
            streams = list(connection.scalars(query))
            named = _keys(connection, replace(question, by=("site", "device")), True) if streams else {}
        return sorted({"/".join(named[stream]) for stream in streams if stream in named})

    def devices(self) -> list[dict[str, Any]]:
        """Return every stored device, with its last `info`, `sys` and `deploy`."""
        table = schema.device
        with self._database.transaction() as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.site, table.c.device)).all()
            return [
                {
                    "site": row.site,
                    "device": row.device,
                    "profile": row.profile or PROFILE_UNKNOWN,
                    "status": row.status,
                    "heard_ms": row.heard_ms,
                    **{name: _fields(getattr(row, name) or "{}") for name in ("info", "sys", "deploy")},
                }
                for row in rows
            ]

    def groups_reporting(self, where: Mapping[str, str], now_ms: int) -> int:
        """Count the groups that match `where` and reported in this hour or the hour before.

        The store gets about this number of rows for each minute.
        """
        table, hour = schema.group_hour, now_ms // MINUTE_MS // HOUR_MIN
        query = sa.select(sa.func.count(sa.distinct(table.c.owner))).where(table.c.time_bin >= hour - 1)
        query = query.join(schema.group, schema.group.c.id == table.c.owner)
        for name, value in where.items():
            query = query.where(schema.group.c[name] == value)
        with self._database.transaction() as connection:
            return int(connection.scalar(query) or 0)

    def events(
        self, since_ms: int, until_ms: int, limit: int = EVENTS_MAX, where: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return at most `limit` events, newest first. `where` may name site, device, model, profile or event."""
        table, owner = schema.event, schema.device
        columns = (owner.c.site, owner.c.device, table.c.at_ms, table.c.fields)
        query = _of_events(sa.select(*columns), since_ms, until_ms, where or {})
        with self._database.transaction() as connection:
            rows = connection.execute(query.order_by(table.c.at_ms.desc(), table.c.seq.desc()).limit(limit)).all()
            return [_event(row) for row in rows]

    def failures(self, since_ms: int, until_ms: int) -> list[dict[str, Any]]:
        """Return the events of releases that devices rolled back or refused, newest first."""
        events = [event for kind in FAILED for event in self.events(since_ms, until_ms, where={"event": kind})]
        return sorted(events, key=lambda event: -event["at_ms"])

    def event_types(self, since_ms: int, until_ms: int, where: Mapping[str, str]) -> dict[str, int]:
        """Return the number of events of each type. `where` has the form that `events` accepts."""
        kind = schema.event.c.event
        query = _of_events(sa.select(kind, sa.func.count()), since_ms, until_ms, where).group_by(kind).order_by(kind)
        with self._database.transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}


def _event(row: sa.Row[Any]) -> dict[str, Any]:
    """Return an event with the fields that its device sent. These fields cannot replace the store's own."""
    origin = {"site": row.site, "device": row.device, "at_ms": row.at_ms}
    return {**origin, **_fields(row.fields), **origin}


def _fields(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise DamagedData(f"stored fields are not JSON: {error}") from error


class _AnswerBuilder:
    """Collects rows by group and merges them at the end."""

    def __init__(self, question: Question, first: int, end: int) -> None:
        self._question, self._first, self._end = question, first, end
        self._numbers: dict[tuple[int, tuple[str, ...]], int] = {}
        self._windows: Counter[int] = Counter()
        self._counters: tuple[Counter[int], ...] = tuple(Counter() for _ in COUNTERS)
        self._missing: dict[int, Counter[str]] = {}
        # For each block of rows: the group of each row, the form of the packed buckets, and the columns.
        self._histograms: list[tuple[list[int], np.dtype[np.void], Sequence[Sequence[Any]]]] = []
        self._stages: dict[int, StageCounts] = {}
        self._groups_max = STAGE_GROUPS_MAX if question.stages else GROUPS_MAX

    def group(self, minute: int, key: tuple[str, ...]) -> int:
        step = (minute - self._first) // self._question.step_min if self._question.step_min else 0
        number = self._numbers.setdefault((step, key), len(self._numbers))
        if number >= self._groups_max:
            raise ConfigInvalid(
                f"the answer has more than {self._groups_max} groups: choose longer steps, a filter, or fewer dimensions in --by"
            )
        return number

    def add_histograms(self, groups: list[int], form: np.dtype[np.void], columns: Sequence[Sequence[Any]]) -> None:
        """Add rows of histograms.

        Args:
            groups: The group of each row.
            form: The form of the packed buckets.
            columns: The columns of HISTOGRAM, in their order.
        """
        _add_up(self._windows, groups, columns[0])
        self._histograms.append((groups, form, columns[1:]))

    def add_stages(self, groups: list[int], form: np.dtype[np.void], blobs: Sequence[bytes]) -> None:
        for group, blob in zip(groups, blobs, strict=True):
            if blob:
                if group not in self._stages:
                    self._stages[group] = StageCounts()
                self._stages[group].add(cells_of(blob, form))

    def add_counters(self, groups: list[int], columns: Sequence[Sequence[int]]) -> None:
        for counted, column in zip(self._counters, columns, strict=True):
            _add_up(counted, groups, column)

    def add_gap(self, gap: gaps.Gap, key: tuple[str, ...], device: str) -> None:
        first, end = max(self._first, gap.from_minute), min(self._end, gap.until_minute + 1)
        step_min = self._question.step_min or self._end - self._first
        for begin in range(self._first + (first - self._first) // step_min * step_min, end, step_min):
            if missing := gap.within(max(begin, first), min(begin + step_min, end)):
                self._missing.setdefault(self.group(begin, key), Counter())[device] += missing

    def answers(self) -> list[Answer]:
        pool = HistogramPool(len(self._numbers))
        for groups, form, (*scalars, blobs) in self._histograms:
            pool.add(groups, blobs, form)
            pool.add_scalars(groups, scalars)
        step_min = self._question.step_min or self._end - self._first
        return [
            Answer(
                group=dict(zip(self._question.by, key, strict=True)),
                start_ms=(self._first + step * step_min) * MINUTE_MS,
                duration_s=min(step_min, self._end - self._first - step * step_min) * 60.0,
                latency=pool.sketch(number),
                windows=self._windows[number],
                counters={name: counted[number] for name, counted in zip(COUNTERS, self._counters, strict=True)},
                missing=dict(self._missing.get(number, ())),
                stages=self._stages.get(number),
            )
            for (step, key), number in sorted(self._numbers.items(), key=lambda item: (item[0][1], item[0][0]))
        ]


def _of_events(query: sa.Select[Any], since_ms: int, until_ms: int, where: Mapping[str, str]) -> sa.Select[Any]:
    """Restrict `query` to the events of a period that match `where`."""
    table, owner = schema.event, schema.device
    of_name = {
        "site": owner.c.site,
        "device": owner.c.device,
        "model": table.c.model,
        "profile": schema.known_profile,
        "event": table.c.event,
    }
    query = query.join(owner, owner.c.id == table.c.device_id).where(
        table.c.at_ms >= since_ms, table.c.at_ms < until_ms
    )
    for name, value in where.items():
        query = query.where(of_name[name] == value)
    return query


def _add_up(counted: Counter[int], groups: Sequence[int], values: Sequence[int]) -> None:
    for group, value in zip(groups, values, strict=True):
        if value:
            counted[group] += value


def _minutes_of(question: Question, now_ms: int) -> tuple[int, int]:
    """Return the first minute of the period, and the minute after its last minute."""
    first, end = max(0, question.since_ms // MINUTE_MS), max(0, -(-question.until_ms // MINUTE_MS))
    fine_from = (now_ms // MINUTE_MS // HOUR_MIN - FINE_HOURS) * HOUR_MIN
    if first < fine_from:
        first = first // HOUR_MIN * HOUR_MIN
    if end < fine_from:
        end = -(-end // HOUR_MIN) * HOUR_MIN
    return first, end


def _parts(question: Question, first: int, end: int) -> list[_Part]:
    """Return the parts that together cover each minute of the period once."""
    hours_from, hours_to = -(-first // HOUR_MIN), end // HOUR_MIN
    # If steps do not begin at whole hours, the whole period needs rows of minutes.
    if question.step_min and (question.step_min % HOUR_MIN or first % HOUR_MIN):
        hours_from = hours_to = 0
    parts = []
    if hours_to > hours_from:
        table = schema.stream_hour if question.names_devices else schema.group_hour
        parts.append(_Part(table, table.c.time_bin, hours_from, hours_to, HOUR_MIN))
        ends = [(first, hours_from * HOUR_MIN), (hours_to * HOUR_MIN, end)]
    else:
        ends = [(first, end)]
    for begin, until in ends:
        if begin < until and question.names_devices:
            for table in (schema.hist_window, schema.metrics_window):
                parts.append(_Part(table, table.c.minute, begin, until, 1))
        elif begin < until:
            parts.append(_Part(schema.group_minute, schema.group_minute.c.time_bin, begin, until, 1))
    return parts


def _read_rows(connection: sa.Connection, question: Question, part: _Part, builder: _AnswerBuilder) -> None:
    table, per_stream = part.table, part.table in (schema.stream_hour, schema.hist_window, schema.metrics_window)
    key = table.c.owner if "owner" in table.c else table.c.stream
    # The names of the owners are read once. A row has only the id of its owner, which is shorter.
    keys = _keys(connection, question, per_stream)
    histogram = [table.c[name] for name in schema.HISTOGRAM] if "buckets" in table.c else []
    stages_table = schema.STAGES.get(table.name)
    stages = [(table if stages_table is None else stages_table).c.stages] if histogram and question.stages else []
    counters = [table.c[name] for name in COUNTERS] if "requests" in table.c else []
    columns = (part.time_bin, key, *stages, *histogram, *counters)
    query = sa.select(*columns).where(part.time_bin >= part.first, part.time_bin < part.end)
    if stages and stages_table is not None:
        same = (stages_table.c.time_bin == table.c.time_bin) & (stages_table.c.owner == table.c.owner)
        query = query.select_from(table.outerjoin(stages_table, same))
    if question.where and len(keys) <= _KEYS_MAX:
        query = query.where(key.in_(keys))
    form, width = (MERGED_FORM if part.minutes > 1 or not per_stream else WINDOW_FORM), len(histogram)
    result = connection.execution_options(stream_results=True).execute(query)
    while block := result.fetchmany(_FETCHED_AT_ONCE):
        mine = [row for row in block if row[1] in keys]
        if not mine:
            continue
        bins, owners, *values = zip(*mine, strict=True)
        groups = [
            builder.group(time_bin * part.minutes, keys[owner]) for time_bin, owner in zip(bins, owners, strict=True)
        ]
        if stages:
            builder.add_stages(groups, form, values.pop(0))
        if histogram:
            builder.add_histograms(groups, form, values[:width])
        if counters:
            builder.add_counters(groups, values[width:])


def _read_gaps(connection: sa.Connection, question: Question, first: int, end: int, builder: _AnswerBuilder) -> None:
    overlapping = list(gaps.overlapping(connection, first, end))
    if overlapping:
        keys = _keys(connection, question, True)
        devices = _keys(connection, replace(question, by=("site", "device")), True)
        for gap in overlapping:
            if gap.stream in keys:
                builder.add_gap(gap, keys[gap.stream], "/".join(devices[gap.stream]))


def _keys(connection: sa.Connection, question: Question, per_stream: bool) -> dict[int, tuple[str, ...]]:
    """Return the id of each stream or stored group that matches the question, with its values of `by`."""
    device, stream, group = schema.device.c, schema.stream.c, schema.group.c
    if per_stream:
        columns: tuple[Any, ...] = (device.site, device.device, stream.model, stream.version, schema.known_profile)
        query: sa.Select[Any] = sa.select(stream.id).join(schema.device, device.id == stream.device_id)
    else:
        columns = (group.site, sa.null(), group.model, group.version, group.profile)
        query = sa.select(group.id)
    of_name = dict(zip(DIMENSIONS, columns, strict=True))
    query = query.add_columns(*(of_name[name] for name in question.by))
    for name, value in question.where.items():
        query = query.where(of_name[name] == value)
    return {row[0]: tuple(row[1:]) for row in connection.execute(query).all()}
