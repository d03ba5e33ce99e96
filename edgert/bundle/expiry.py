"""Until when a bundle may be installed: UTC, as it stands in the manifest, and as people say it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from edgert.errors import BundleExpired, ConfigInvalid

_FORM = "%Y-%m-%dT%H:%M:%SZ"
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1)}
_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc)


def expiry_time(text: str) -> float:
    """Seconds since 1970 of `2027-02-19T08:00:00Z`. Raises ValueError for every other form."""
    found = datetime.strptime(text, _FORM).replace(tzinfo=timezone.utc)
    if found.strftime(_FORM) != text:  # strptime takes more than one way to write it
        raise ValueError(f"{text[:40]!r} is no time of the form 2027-02-19T08:00:00Z")
    return found.timestamp()


def expiry_from(text: str, now_s: float) -> str:
    """What a manifest states for `90d`, `12h`, `2027-02-19` (its last second) or the whole form. Raises ConfigInvalid."""
    now = datetime.fromtimestamp(now_s, timezone.utc)
    try:
        if match := re.fullmatch(r"(\d{1,6})([hd])", text):
            until = now + int(match[1]) * _UNITS[match[2]]
        elif re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            until = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc) + timedelta(days=1, seconds=-1)
        else:
            until = datetime.fromtimestamp(expiry_time(text), timezone.utc)
    except (ValueError, OverflowError) as error:
        raise ConfigInvalid(f"{text!r} is no expiry: give 90d, 12h, 2027-02-19 or 2027-02-19T08:00:00Z") from error
    if not now < until < _LATEST:
        raise ConfigInvalid(f"an expiry of {text!r} is {until.strftime(_FORM)}: give a time to come")
    return until.strftime(_FORM)


def check_expiry(expires: str, what: str, now_s: float) -> None:
    """Raises BundleExpired where `what` (model and release) may not be installed any more by a clock that says `now_s`."""
    if expires and now_s >= expiry_time(expires):
        now = datetime.fromtimestamp(now_s, timezone.utc).strftime(_FORM)
        raise BundleExpired(
            f"{what} was to be installed until {expires}, and it is {now}: build it again with --expires"
        )
