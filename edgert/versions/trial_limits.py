"""The limits of a trial: their bounds, the time of the watch, and the test of each limit. Pure.

The device compares each limit with its own measurements of the version on trial. A limit that could not be measured
counts as broken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.printable import counted

WATCH_S = 60.0  # the time of the watch, if none is given
WATCH_S_MAX = 23 * 3600.0  # the longest watch: with loading and confirmation, it is still below the longest trial
REQUESTS_MIN = 100  # a p99 or an error rate of fewer requests has no meaning; golden samples fill up to this number
COMPARED_MIN = 20  # the agreement of fewer compared answers has no meaning
COMPARED_FEW = 300  # fewer answers hardly distinguish similar versions (docs/deploying.md)
BROKEN_CHECKS_MAX = 3  # a limit that is broken so often in a row ends the watch; a single outlier does not
FILL_S_MAX = 60.0  # the time for golden samples at the end of a watch with too few requests
OFF = "off"

# name -> (whether higher values break it, whether it is a share, its unit, its meaning)
_KINDS: dict[str, tuple[bool, bool, str, str]] = {
    "p99_ms": (True, False, " ms", "latency that 99 % of the answers do not exceed"),
    "memory_mb": (True, False, " MB", "the worker's memory (PSS)"),
    "temp_c": (True, False, " °C", "the device's hottest thermal zone"),
    "error_share": (True, True, "", "requests refused or failed"),
    "agreement": (False, True, "", "answers that agree with the previous version"),
    "min_requests": (False, False, "", "requests from apps"),
}
LIMIT_NAMES = tuple(_KINDS)


@dataclass(frozen=True)
class TrialLimits:
    """The limits of a trial: `bounds` by name, and the time of the watch.

    The watch starts when the version serves. When the limits have held for the whole watch, the device itself marks an
    `unattended` trial good. Else the host has `confirm_s` to do so. `started` (the watch) and `passed` record the
    progress.
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
            raise ConfigInvalid(f"a watch of {self.watch_s:g} s; give more than 0 and at most {WATCH_S_MAX:g} s")

    @property
    def fills(self) -> bool:
        """Whether the device sends golden samples to the model if apps sent too few requests."""
        return "p99_ms" in self.bounds or "error_share" in self.bounds

    @property
    def trial_s(self) -> float:
        """The longest time that the watch can add to a trial."""
        return self.watch_s + (FILL_S_MAX if self.fills else 0.0)

    def words(self) -> list[str]:
        """Return the limits as options of `edgertd activate`."""
        limits = [word for name, value in self.bounds.items() for word in ("--limit", f"{name}={value!r}")]
        return [*limits, "--watch", duration_text(self.watch_s), *(["--unattended"] if self.unattended else [])]

    def same_as(self, other: TrialLimits) -> bool:
        """Return whether both have the same requirements; their progress does not count."""
        return (self.bounds, self.watch_s, self.unattended) == (other.bounds, other.watch_s, other.unattended)

    def described(self) -> str:
        """Return the limits as text for messages."""
        kinds = [(name, _KINDS[name], value) for name, value in self.bounds.items()]
        limits = [
            f"{name} {'<=' if above else '>='} {_text(value, share)}{unit}"
            for name, (above, share, unit, _), value in kinds
        ]
        return f"{', '.join(limits) or 'no crash'} over {self.watch_s:g} s{', marked good by the device itself' * self.unattended}"


@dataclass(frozen=True)
class Readings:
    """Figures that a device measured while the version on trial served.

    `requests` counts all requests, `failed` the refused or failed ones, `golden` those that EdgeRT itself sent.
    `compared` counts the answers that were compared with answers of the old version, `agreed` those that agreed.
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

    def value(self, name: str) -> float | None:
        """Return the measured value for limit `name`; None if it is not known yet."""
        if name == "p99_ms":
            return self.p99_ms if self.answered else None
        if name == "error_share":
            return self.failed / self.requests if self.requests else None
        if name == "agreement":
            return self.agreed / self.compared if self.compared else None
        if name == "min_requests":
            return float(self.of_apps)
        return self.temp_c if name == "temp_c" else self.memory_mb

    def described(self) -> str:
        """Return the figures as text for messages."""
        parts = [counted(self.of_apps, "request")]
        if self.golden:
            parts.append(counted(self.golden, "golden sample"))
        if self.answered:
            parts.append(f"p99 {self.p99_ms:.3g} ms")
        if self.requests:
            parts.append(f"{_text(self.failed / self.requests, True)} failed")
        parts.append(f"{self.memory_mb:.0f} MB")
        if self.temp_c is not None:
            parts.append(f"{self.temp_c:g} °C")
        if self.compared:
            parts.append(f"{_text(self.agreed / self.compared, True)} of {self.compared} answers agree")
        return ", ".join(parts)


@dataclass(frozen=True)
class Broken:
    """A broken limit. `value` is None if it could not be measured."""

    name: str
    value: float | None
    limit: float
    message: str


def broken(limits: TrialLimits, readings: Readings, *, at_end: bool) -> list[Broken]:
    """Return the broken limits: during the watch only those that are certain, at the end all."""
    reasons = []
    for name, limit in limits.bounds.items():
        above, share, unit, _ = _KINDS[name]
        value = readings.value(name)
        if value is not None and _can_judge(name, readings, at_end):
            if (value > limit) if above else (value < limit):
                bound = "at most" if above else "at least"
                text = f"{name} is {_text(value, share)}{unit}, the limit is {bound} {_text(limit, share)}{unit}"
                reasons.append(Broken(name, value, limit, f"{text} ({readings.described()})"))
        elif at_end:
            reasons.append(Broken(name, None, limit, _not_measured(name, readings)))
    return reasons


def doubt(limits: TrialLimits, readings: Readings) -> str:
    """Return a warning about an agreement of only few answers, "" if there are enough."""
    if "agreement" not in limits.bounds or not COMPARED_MIN <= readings.compared < COMPARED_FEW:
        return ""
    return f"only {readings.compared} answers were compared for agreement, too few to distinguish similar versions"


def parse_limits(words: Iterable[str]) -> dict[str, float | None]:
    """Parse `NAME=VALUE` words; None stands for `NAME=off`. Raises ConfigInvalid."""
    limits: dict[str, float | None] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigInvalid(f"{word!r} is not a limit: give NAME=VALUE, such as p99_ms=8")
        limits[name.strip()] = limit_value(name.strip(), text.strip())
    return limits


def limit_value(name: str, given: str | float) -> float | None:
    """Parse the bound of limit `name`, shares also as `99%`; return None for `off`. Raises ConfigInvalid."""
    if given == OFF:
        _check(name, 0.5)
        return None
    text = str(given)
    try:
        percent = text.endswith("%")
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError as error:
        raise ConfigInvalid(f"limit {name}: {text!r} is not a number") from error
    _check(name, value)
    if percent and not _KINDS[name][1]:
        raise ConfigInvalid(
            f"limit {name}: {text!r} is a share; give a number{_KINDS[name][2] and ' of' + _KINDS[name][2]}"
        )
    return value


def _check(name: str, value: float) -> None:
    if name not in _KINDS:
        known = "; ".join(f"{each} ({kind[3]})" for each, kind in _KINDS.items())
        raise ConfigInvalid(f"unknown limit {name[:80]!r}; known: {known}")
    share = _KINDS[name][1]
    if not (math.isfinite(value) and 0 <= value <= (1 if share else math.inf)):
        rule = "a share from 0 to 1, or a percentage" if share else "a number from 0 up"
        raise ConfigInvalid(f"limit {name} is {value:g}: give {rule}")


def _can_judge(name: str, readings: Readings, at_end: bool) -> bool:
    """Return whether the value is certain enough, at the end of the watch or during the watch."""
    if name == "agreement":
        return readings.compared >= COMPARED_MIN
    if name in ("p99_ms", "error_share"):
        return at_end or readings.requests >= REQUESTS_MIN
    return at_end or name != "min_requests"


def _not_measured(name: str, readings: Readings) -> str:
    if name == "agreement":
        return (
            f"agreement could not be judged: {readings.compared} answers were compared, {COMPARED_MIN} are needed "
            f"({readings.described()}): watch for longer, or omit this limit"
        )
    return f"{name} could not be measured ({readings.described()}): watch for longer, or leave this limit out"


def _text(value: float, share: bool) -> str:
    if share:
        return f"{value * 100:.3g}%"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
