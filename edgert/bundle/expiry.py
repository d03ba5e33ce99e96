"""The expiry of a bundle: the time, in UTC, until which a device may install it."""

from __future__ import annotations

from datetime import datetime, timezone

from edgert.errors import BundleExpired

FORM = "%Y-%m-%dT%H:%M:%SZ"


def expiry_time(text: str) -> float:
    """Return the seconds since 1970 of `2027-02-19T08:00:00Z`. Raises ValueError for every other form."""
    expiry = datetime.strptime(text, FORM).replace(tzinfo=timezone.utc)
    if expiry.strftime(FORM) != text:  # strptime accepts other forms of the same time
        raise ValueError(f"{text[:40]!r} is not of the form 2027-02-19T08:00:00Z")
    return expiry.timestamp()


def time_text(time_s: float) -> str:
    """Return the UTC time of `time_s`, in seconds since 1970, as 2027-02-19T08:00:00Z."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime(FORM)


def check_expiry(expires: str, what: str, now_s: float) -> None:
    """Raise BundleExpired if `what` (model and release) has expired at `now_s`, in seconds since 1970."""
    if expires and now_s >= expiry_time(expires):
        raise BundleExpired(
            f"{what} expired at {expires}; the time is {time_text(now_s)}. Build it again, with a later --expires"
        )
