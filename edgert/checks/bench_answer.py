"""The output of `edgertd bench --json`, as types; the host reads the same types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from edgert.errors import ErrorText
from edgert.typed_json import FLAT, OMITTED


class BenchMode(str, Enum):
    """The way in which artifacts were run."""

    ENGINE = "engine"  # the engine alone
    AS_SERVED = "as-served"  # the live version, through the socket


@dataclass(frozen=True)
class BenchMachine:
    """The machine of a measurement, and its processor."""

    machine: str
    cpu: str
    cpus: int


@dataclass(frozen=True)
class Temperatures:
    """The temperature of the machine, in °C; None if the machine has no sensor."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class BenchTimes:
    """Percentiles of the time of one run or answer.

    `runs` is the number of measured runs or answers, and `per_s` is their rate.
    """

    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    per_s: float
    runs: int


@dataclass(frozen=True)
class BenchResult:
    """The `times` of one artifact, or the `error` that prevented the measurement.

    Attributes:
        memory_mb: The memory of the engine's session or of the worker.
        load_s: The time of a load; only for BenchMode.ENGINE.
        threads_ms: The median time by the number of threads; only for BenchMode.ENGINE.
        degraded: Whether the model does not serve on its first engine; only for BenchMode.AS_SERVED.
        clients: The number of clients that send requests at the same time; only for BenchMode.AS_SERVED.
        together_p99_ms: The 99th percentile of the answers to these clients; only for BenchMode.AS_SERVED.
    """

    id: str
    engine: str | None
    engine_version: str | None = field(default=None, metadata={OMITTED: True})
    threads: int | None = field(default=None, metadata={OMITTED: True})
    memory_mb: float | None = field(default=None, metadata={OMITTED: True})
    load_s: float | None = field(default=None, metadata={OMITTED: True})
    threads_ms: Mapping[int, float] | None = field(default=None, metadata={OMITTED: True})
    degraded: bool | None = field(default=None, metadata={OMITTED: True})
    clients: int | None = field(default=None, metadata={OMITTED: True})
    together_p99_ms: float | None = field(default=None, metadata={OMITTED: True})
    times: BenchTimes | None = field(default=None, metadata={FLAT: True})
    error: ErrorText | None = field(default=None, metadata={OMITTED: True})


@dataclass(frozen=True)
class BenchAnswer:
    """The results of a measurement, in the order of the artifacts."""

    mode: BenchMode
    machine: BenchMachine
    temp_c: Temperatures
    results: tuple[BenchResult, ...]
