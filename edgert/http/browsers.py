"""Recognizes requests that a browser makes for a page of another site, and names in `Host`.

A page of an unknown author can make a browser send requests to 127.0.0.1 or to a machine of the local network. So the
server refuses requests that a browser marks as requests of another site. Every browser sends Origin with each POST;
browsers since 2023 send Sec-Fetch-Site with every request to 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

READING = ("GET", "HEAD")


def from_another_site(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether another site's page made this request. A click on a link does not count."""
    if method in READING and headers.get("sec-fetch-mode") == "navigate":
        return False
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def host_name(header: str) -> str:
    """Return the name or address in a `Host` field, in lower case and without its port."""
    name, _, port = header.rpartition(":")
    return (name if port.isdecimal() else header).strip("[]").lower()


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `host` as an address; None for a name, which DNS could redirect."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
