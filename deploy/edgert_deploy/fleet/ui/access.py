"""Access to the page: on loopback all users, on other addresses only users with the token.

This module does no I/O. Another site can map its own name to the address 127.0.0.1, and then read this server's answers
(DNS rebinding). So `Host` must be a known name of this server. Requests that a browser marks as sent by another site
are refused.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from edgert.http.browsers import address_of, from_another_site, host_name

TOKEN_BYTES = 24


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True)
class Access:
    """The host names, the token and the cookie with which a request may open the page.

    Attributes:
        names: The values of `Host` that are accepted besides the names of loopback.
        token: The token that a client needs; None if no token is needed. With a token, `Host` may be any IP address.
        cookie: The name of the cookie with the token.
    """

    names: frozenset[str]
    token: str | None = None
    cookie: str = ""

    def refusal(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused; None if it is allowed. The names in `headers` are in lower case."""
        host = host_name(headers.get("host", ""))
        if not self._knows(host):
            return f"{host[:80]!r} is not a known name of this server: allow it with --name"
        return "requests from other sites are refused" if from_another_site(method, headers) else None

    def knows_token(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has the token (a cookie or `Authorization: Bearer`), or needs no token."""
        if self.token is None:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        # Python's own parser of cookies takes seconds for some headers (CVE-2024-7592), and anybody may send them.
        cookies = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        by_header = scheme.lower() == "bearer" and self.is_token(bearer.strip())
        return by_header or any(name == self.cookie and self.is_token(value) for name, _, value in cookies)

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _knows(self, host: str) -> bool:
        by_address = self.token is not None and address_of(host) is not None
        return is_loopback(host) or host in self.names or by_address
