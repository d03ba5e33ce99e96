"""The period that a page or a program requests, and its steps. This module does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from edgert.durations import duration_s, duration_text
from edgert.errors import ConfigInvalid
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from edgert_deploy.fleet.store.store import FINE_HOURS

LENGTH_DEFAULT = "1h"
LEAST_S, MOST_S = 300, 400 * 86_400
STEPS_MIN = (1, 5, 15, 60, 240, 720, 1440, 4320)  # minutes
STEPS_MAX = 180
FRESH_SHARE = 1 / 30  # an answer is fresh for this share of a step


@dataclass(frozen=True)
class Period:
    """A period: the last `length_ms`. If `length_ms` is 0, from `since_ms` to `until_ms` (ms since 1970)."""

    length_ms: int = 0
    since_ms: int = 0
    until_ms: int = 0

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> Period:
        """Read `period`, the length of time until now, or `from` and `to`. Raises ConfigInvalid."""
        length, since, until = (parameters.get(name, "") for name in ("period", "from", "to"))
        if not since and not until:
            return cls(_checked(duration_s(length or LENGTH_DEFAULT)))
        if length:
            raise ConfigInvalid("give either `period`, or `from` and `to`")
        if not since or not until:
            raise ConfigInvalid(f"a period has `from` and `to`: give `{'to' if since else 'from'}`, too")
        since_ms, until_ms = _moment_ms("from", since), _moment_ms("to", until)
        _checked((until_ms - since_ms) / 1000)
        return cls(0, since_ms, until_ms)

    @property
    def minutes(self) -> float:
        return (self.length_ms or self.until_ms - self.since_ms) / MINUTE_MS

    def bounds_ms(self, now_ms: int) -> tuple[int, int]:
        """Return the beginning and the end."""
        return (now_ms - self.length_ms, now_ms) if self.length_ms else (self.since_ms, self.until_ms)

    def step_min(self, now_ms: int, minutes_from_ms: int | None) -> int:
        """Return the shortest step, in minutes, that divides the period into at most STEPS_MAX steps.

        The store has rows of minutes from `minutes_from_ms` on (None: there are no such rows). A step is at least an
        hour if the period begins before these rows and more than FINE_HOURS ago.
        """
        since_ms = self.bounds_ms(now_ms)[0]
        coarse = minutes_from_ms is None or since_ms < minutes_from_ms
        least = HOUR_MIN if coarse and self._is_old(now_ms) else 1
        return next(step for step in STEPS_MIN if step >= least and self.minutes / step <= STEPS_MAX)

    def stepped_ms(self, now_ms: int, step_min: int) -> tuple[int, int]:
        """Return the beginning and the end, at whole steps. A period until now ends with the present step.

        A period that begins more than FINE_HOURS ago begins and ends at whole hours, as in the store.
        """
        step_ms = step_min * MINUTE_MS
        if self.length_ms:
            until_ms = (now_ms // step_ms + 1) * step_ms
            return until_ms + -self.length_ms // step_ms * step_ms, until_ms
        grain_ms = max(step_ms, HOUR_MIN * MINUTE_MS) if self._is_old(now_ms) else step_ms
        return self.since_ms // grain_ms * grain_ms, -(-self.until_ms // grain_ms) * grain_ms

    def _is_old(self, now_ms: int) -> bool:
        return self.bounds_ms(now_ms)[0] < now_ms - FINE_HOURS * HOUR_MIN * MINUTE_MS


def fresh_s(step_min: int) -> float:
    """Return the time for which an answer with such steps is fresh."""
    return step_min * 60 * FRESH_SHARE


def _checked(seconds: float) -> int:
    if not LEAST_S <= seconds <= MOST_S:
        raise ConfigInvalid(
            f"a period of {duration_text(seconds)} cannot be shown: choose {duration_text(LEAST_S)} to {duration_text(MOST_S)}"
        )
    return int(seconds * 1000)


def _moment_ms(name: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text[:40].replace("Z", "+00:00"))
        if moment.tzinfo is None:
            raise ValueError
        return int(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise ConfigInvalid(f"{name}={text[:40]!r} is not a time with its zone, such as 2026-11-22T14:05Z") from error
