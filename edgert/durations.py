"""Durations as people write and read them: `90s`, `10m`, `1.5h`, `7d`."""

from __future__ import annotations

import re

from edgert.errors import ConfigInvalid

TRIAL_S_MAX = 24 * 3600.0  # the longest trial: of a model by a channel or a host, or of a runtime
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FORM = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([smhd])", re.ASCII)


def duration_s(text: str) -> float:
    """Return the seconds of `10s`, `5m`, `1.5h` or `7d`; `0` needs no unit. Raises ConfigInvalid."""
    if text == "0":
        return 0.0
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigInvalid(f"{text[:40]!r} is not a duration: give a number and s, m, h or d, such as 90s, 10m or 2h")
    return round(float(match[1]) * UNITS_S[match[2]], 6)


def duration_text(seconds: float) -> str:
    """Return a text for `duration_s`, in the largest unit that gives a whole number: `10m`, `0.5s`."""
    for unit in ("d", "h", "m"):
        if seconds >= UNITS_S[unit] and seconds % UNITS_S[unit] == 0:
            return f"{seconds / UNITS_S[unit]:.0f}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"
