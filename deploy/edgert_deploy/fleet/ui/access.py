"""Who may read the page: on loopback whoever sits at this machine, elsewhere who has the token. Pure.

A page of a foreign site can make a browser ask 127.0.0.1, and a name of its own that suddenly resolves to 127.0.0.1
makes the answer readable (DNS rebinding). Hence `Host` must be a name that this server is known by, and a request
that a browser marks as another site's is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

TOKEN_BYTES = 24
_LOOPBACK_NAMES = ("localhost",)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True)
class Access:
    """`names`: what `Host` may say besides loopback's names, without a port; with a `token`, addresses too."""

    names: frozenset[str]
    token: str | None = None
    cookie: str = ""

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Why a request may not be answered whatever it asks for; None where it may."""
        host = _host_of(headers.get("Host", ""))
        if not self._knows(host):
            return f"this server is not known as {host[:80]!r}; allow it with --name"
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != headers.get("Host"):
            return "requests of other sites are not answered"
        if headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and headers.get("Sec-Fetch-Mode") != "navigate":
            return "requests of other sites are not answered"
        return None

    def knows_token(self, headers: Mapping[str, str]) -> bool:
        """Whether a request shows the token, as a cookie or as `Authorization: Bearer`, or needs none."""
        if self.token is None:
            return True
        given = headers.get("Authorization", "").removeprefix("Bearer ")
        # By hand: Python's own reader of cookies takes seconds for some headers (CVE-2024-7592), whoever sends them.
        cookies = (pair.strip().partition("=") for pair in headers.get("Cookie", "").split(";"))
        return self.is_token(given) or any(name == self.cookie and self.is_token(value) for name, _, value in cookies)

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _knows(self, host: str) -> bool:
        if is_loopback(host) or host in self.names:
            return True
        try:  # an address is no name that could be made to point elsewhere
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return self.token is not None


def _host_of(header: str) -> str:
    """`Host` without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()
