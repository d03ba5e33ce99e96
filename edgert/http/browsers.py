"""Requests that a browser makes for a page of another site. Pure.

A page can make a browser send requests to 127.0.0.1 or to a machine of the local network, and cannot be asked who wrote
it. So requests that a browser marks as another site's are refused. Every browser sends Origin with each POST; browsers
since 2023 send Sec-Fetch-Site with every request to 127.0.0.1.
"""

from __future__ import annotations

from collections.abc import Mapping

READING = ("GET", "HEAD")


def from_another_site(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether another site's page made this request; following a link is allowed."""
    if method in READING and headers.get("sec-fetch-mode") == "navigate":
        return False
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
