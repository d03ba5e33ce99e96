"""Sizes and rates as text: `500KB`, `2MB/s`. Durations are in `edgert/durations.py`.

Options and keys of edgert.toml accept only these forms. Units are decimal, as for disks and networks.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from edgert.bundle.expiry import FORM, expiry_time
from edgert.durations import UNITS_S, duration_s
from edgert.errors import ConfigInvalid

UNITS_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
_DATE = "%Y-%m-%d"
_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc)


def size_bytes(text: str) -> int:
    """Return the bytes of `500KB`, `2MB` or `1.5 GB`. Raises ConfigInvalid."""
    match = re.fullmatch(rf"{_NUMBER} ?([KMGT]?B)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigInvalid(f"{text[:40]!r} is not a size: give a number and KB, MB or GB, such as 500KB or 2GB")
    return round(float(match[1]) * UNITS_BYTES[match[2].upper()])


def rate_bytes_per_s(text: str) -> float:
    """Return the bytes a second of `500KB/s` or `2MB/s`. Raises ConfigInvalid."""
    size, slash, unit = text.strip().partition("/")
    if not slash or unit != "s":
        raise ConfigInvalid(f"{text[:40]!r} is not a rate: give a size for each second, such as 500KB/s or 2MB/s")
    return float(size_bytes(size))


def share_text(share: float | None) -> str:
    """Return `97 %`, or `-` for an unknown share."""
    return "-" if share is None else f"{100 * share:.0f} %"


def difference_text(value: float) -> str:
    """Return `+0.0123` or `-0.0123`; a difference that rounds to zero is `+0.0000`."""
    return f"{round(value, 4) + 0.0:+.4f}"


def size_text(size_bytes: int) -> str:
    """Return `12.3 MB`, `4.5 KB` or `67 bytes`."""
    if size_bytes >= 1_000_000:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e3:.1f} KB" if size_bytes >= 1000 else f"{size_bytes} bytes"


def expiry_from(text: str, now_s: float) -> str:
    """Return the UTC time of a manifest for `90d`, `12h`, `2027-02-19` (its last second) or a full time.

    Raises ConfigInvalid.
    """
    now = datetime.fromtimestamp(now_s, timezone.utc)
    try:
        if text[-1:] in UNITS_S:
            until = now + timedelta(seconds=duration_s(text))
        elif re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            until = datetime.strptime(text, _DATE).replace(tzinfo=timezone.utc) + timedelta(days=1, seconds=-1)
        else:
            until = datetime.fromtimestamp(expiry_time(text), timezone.utc)
    except (ValueError, OverflowError, ConfigInvalid) as error:
        raise ConfigInvalid(f"{text[:40]!r} is not an expiry: give 90d, 2027-02-19 or 2027-02-19T08:00:00Z") from error
    if not now < until < _LATEST:
        raise ConfigInvalid(f"the expiry {text!r} is {until.strftime(FORM)}: choose a time after now")
    return until.strftime(FORM)
