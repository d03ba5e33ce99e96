"""The limits of a trial: their bounds, the time of the watch, and the test of each limit.

The device compares each limit with its own measurements of the version on trial. A limit that could not be measured
is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.printable import counted

WATCH_S = 60.0  # the time of the watch, if none is given
WATCH_S_MAX = 23 * 3600.0  # the longest watch: with loading and confirmation, it is still below the longest trial
REQUESTS_MIN = 100  # a p99 or an error rate of fewer requests has no meaning; golden samples add the missing requests
COMPARED_MIN = 20  # the agreement of fewer compared answers has no meaning
COMPARED_FEW = 300  # with fewer answers, agreement cannot distinguish similar versions well (docs/deploying.md)
BROKEN_CHECKS_MAX = 3  # this number of checks in a row with a broken limit ends the watch; one outlier does not
FILL_S_MAX = 60.0  # the time for golden samples at the end of a watch with too few requests
OFF = "off"


@dataclass(frozen=True)
class TrialLimits:
    """The limits of a trial, the time of the watch, and the progress of the watch.

    Attributes:
        bounds: The bound of each limit by the limit's name.
        watch_s: The time for which the limits must hold, from the moment the version serves.
        unattended: Whether the device itself marks the version good when all limits have held.
        confirm_s: If `unattended` is false, the time that the host has to mark the version good.
        passed: Whether all limits have held for the whole watch.
    """

    bounds: dict[str, float]
    watch_s: float = WATCH_S
    unattended: bool = False
    confirm_s: float = 60.0
    started: bool = False
    passed: bool = False

    def __post_init__(self) -> None:
        for name, value in self.bounds.items():
            _check(name, value)
        if not 0 < self.watch_s <= WATCH_S_MAX:
            raise ConfigInvalid(
                f"a watch of {self.watch_s:g} s is not allowed; give more than 0 and at most {WATCH_S_MAX:g} s"
            )

    @property
    def adds_golden_samples(self) -> bool:
        """Whether the device sends golden samples to the model if apps sent too few requests."""
        return "p99_ms" in self.bounds or "error_share" in self.bounds

    @property
    def trial_s(self) -> float:
        """The longest time that the watch can add to a trial."""
        return self.watch_s + (FILL_S_MAX if self.adds_golden_samples else 0.0)

    def as_options(self) -> list[str]:
        """Return the limits as options of `edgertd activate`."""
        limits = [word for name, value in self.bounds.items() for word in ("--limit", f"{name}={value!r}")]
        return [*limits, "--watch", duration_text(self.watch_s), *(["--unattended"] if self.unattended else [])]

    def same_as(self, other: TrialLimits) -> bool:
        """Return whether `self` and `other` have the same requirements; their progress may differ."""
        return (self.bounds, self.watch_s, self.unattended) == (other.bounds, other.watch_s, other.unattended)

    def described(self) -> str:
        """Return the limits as text for messages."""
        kinds = [(_KINDS[name], value) for name, value in self.bounds.items()]
        limits = [f"{kind.name} {'<=' if kind.is_highest else '>='} {kind.text(value)}" for kind, value in kinds]
        marked = ", marked good by the device itself" if self.unattended else ""
        return f"{', '.join(limits) or 'the worker must not end'} over {self.watch_s:g} s{marked}"


@dataclass(frozen=True)
class Readings:
    """Figures that a device measured while the version on trial served.

    Attributes:
        failed: The number of requests that were refused or failed.
        golden: The number of golden samples, which EdgeRT itself sent.
        compared: The number of answers that were compared with answers of the previous version.
    """

    requests: int = 0
    failed: int = 0
    golden: int = 0
    p99_ms: float = 0.0
    memory_mb: float = 0.0
    temp_c: float | None = None
    compared: int = 0
    agreed: int = 0

    @property
    def of_apps(self) -> int:
        return max(0, self.requests - self.golden)

    @property
    def answered(self) -> int:
        return self.requests - self.failed

    @property
    def error_share(self) -> float | None:
        return self.failed / self.requests if self.requests else None

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.compared if self.compared else None

    def described(self) -> str:
        """Return the figures as text for messages."""
        parts = [counted(self.of_apps, "request")]
        if self.golden:
            parts.append(counted(self.golden, "golden sample"))
        if self.answered:
            parts.append(f"p99 {self.p99_ms:.3g} ms")
        if self.error_share is not None:
            parts.append(f"{_percent(self.error_share)} failed")
        parts.append(f"{self.memory_mb:.0f} MB")
        if self.temp_c is not None:
            parts.append(f"{self.temp_c:g} °C")
        if self.agreement is not None:
            parts.append(f"{_percent(self.agreement)} of {self.compared} answers agree")
        return ", ".join(parts)


class _Kind(NamedTuple):
    """A kind of limit.

    Attributes:
        is_highest: Whether the limit is the highest allowed value; otherwise, it is the lowest.
        is_share: Whether the value is a share from 0 to 1.
        read: Returns the measured value; None if it is not known.
        is_certain: Returns whether the limit can be broken before the end of the watch.
    """

    name: str
    is_highest: bool
    is_share: bool
    unit: str
    meaning: str
    read: Callable[[Readings], float | None]
    is_certain: Callable[[Readings], bool] = lambda readings: True

    def text(self, value: float) -> str:
        number = f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
        return _percent(value) if self.is_share else f"{number}{self.unit}"


def _enough(readings: Readings) -> bool:
    return readings.requests >= REQUESTS_MIN


_KINDS = {
    kind.name: kind
    for kind in (
        _Kind(
            "p99_ms",
            True,
            False,
            " ms",
            "the 99th percentile of the latency",
            lambda readings: readings.p99_ms if readings.answered else None,
            _enough,
        ),
        _Kind("memory_mb", True, False, " MB", "the worker's memory (PSS)", lambda readings: readings.memory_mb),
        _Kind("temp_c", True, False, " °C", "the device's hottest thermal zone", lambda readings: readings.temp_c),
        _Kind(
            "error_share",
            True,
            True,
            "",
            "the share of requests that were refused or failed",
            lambda readings: readings.error_share,
            _enough,
        ),
        _Kind(
            "agreement",
            False,
            True,
            "",
            "the share of answers that agree with the previous version",
            lambda readings: readings.agreement if readings.compared >= COMPARED_MIN else None,
        ),
        _Kind(
            "min_requests",
            False,
            False,
            "",
            "the number of requests from apps",
            lambda readings: float(readings.of_apps),
            lambda readings: False,
        ),
    )
}
LIMIT_NAMES = tuple(_KINDS)


@dataclass(frozen=True)
class BrokenLimit:
    """A broken limit. `value` is None if the device could not measure it."""

    name: str
    value: float | None
    limit: float
    message: str


def broken_limits(limits: TrialLimits, readings: Readings, *, at_end: bool) -> list[BrokenLimit]:
    """Return the broken limits. Before the end of the watch, only a value that is certain breaks a limit.

    At the end, a limit that could not be measured is also broken.
    """
    reasons = []
    for name, limit in limits.bounds.items():
        kind = _KINDS[name]
        value = kind.read(readings)
        if value is not None and (at_end or kind.is_certain(readings)):
            if (value > limit) if kind.is_highest else (value < limit):
                side = "above" if kind.is_highest else "below"
                text = f"{name} is {kind.text(value)}, {side} its limit of {kind.text(limit)}"
                reasons.append(BrokenLimit(name, value, limit, f"{text} ({readings.described()})"))
        elif at_end:
            reasons.append(BrokenLimit(name, None, limit, _not_measured(name, readings)))
    return reasons


def doubt(limits: TrialLimits, readings: Readings) -> str:
    """Return a warning if only few answers were compared for the agreement, else ""."""
    if "agreement" not in limits.bounds or not COMPARED_MIN <= readings.compared < COMPARED_FEW:
        return ""
    return f"only {readings.compared} answers were compared for agreement, too few to distinguish similar versions"


def parse_limits(words: Iterable[str]) -> dict[str, float | None]:
    """Parse words of the form `NAME=VALUE`. `NAME=off` gives None. Raises ConfigInvalid."""
    limits: dict[str, float | None] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigInvalid(f"{word!r} is not a limit: give NAME=VALUE, such as p99_ms=8")
        limits[name.strip()] = limit_value(name.strip(), text.strip())
    return limits


def limit_value(name: str, given: str | float) -> float | None:
    """Parse the bound of limit `name`; a share may be `99%`, and `off` gives None. Raises ConfigInvalid."""
    if given == OFF:
        _check_name(name)
        return None
    text = str(given)
    try:
        percent = text.endswith("%")
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError as error:
        raise ConfigInvalid(f"limit {name}: {text!r} is not a number") from error
    _check(name, value)
    if percent and not _KINDS[name].is_share:
        unit = _KINDS[name].unit
        raise ConfigInvalid(f"limit {name}: {text!r} is a percentage; give a number{f' of{unit}' if unit else ''}")
    return value


def _check_name(name: str) -> None:
    if name not in _KINDS:
        known = "; ".join(f"{each} ({kind.meaning})" for each, kind in _KINDS.items())
        raise ConfigInvalid(f"unknown limit {name[:80]!r}; known: {known}")


def _check(name: str, value: float) -> None:
    _check_name(name)
    share = _KINDS[name].is_share
    if not (math.isfinite(value) and 0 <= value <= (1 if share else math.inf)):
        rule = "a share from 0 to 1, or a percentage" if share else "a number from 0 up"
        raise ConfigInvalid(f"limit {name} is {value:g}: give {rule}")


def _not_measured(name: str, readings: Readings) -> str:
    if name == "agreement":
        return (
            f"agreement could not be judged: {readings.compared} answers were compared, {COMPARED_MIN} are needed "
            f"({readings.described()}): watch for longer, or omit this limit"
        )
    return f"{name} could not be measured ({readings.described()}): watch for longer, or omit this limit"


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"
