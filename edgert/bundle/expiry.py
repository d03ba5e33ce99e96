"""The time until which a bundle may be installed, in UTC, as its manifest states it."""

from __future__ import annotations

from datetime import datetime, timezone

from edgert.errors import BundleExpired

FORM = "%Y-%m-%dT%H:%M:%SZ"


def expiry_time(text: str) -> float:
    """Seconds since 1970 of `2027-02-19T08:00:00Z`. Raises ValueError for every other form."""
    found = datetime.strptime(text, FORM).replace(tzinfo=timezone.utc)
    if found.strftime(FORM) != text:  # strptime takes more than one way to write it
        raise ValueError(f"{text[:40]!r} is no time of the form 2027-02-19T08:00:00Z")
    return found.timestamp()


def check_expiry(expires: str, what: str, now_s: float) -> None:
    """Raises BundleExpired where `what` (model and release) may not be installed any more by a clock that says `now_s`."""
    if expires and now_s >= expiry_time(expires):
        now = datetime.fromtimestamp(now_s, timezone.utc).strftime(FORM)
        raise BundleExpired(
            f"{what} was to be installed until {expires}, and it is {now}: build it again with --expires"
        )
