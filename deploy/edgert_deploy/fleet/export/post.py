"""Posts a body to a metrics endpoint, and translates failures of the endpoint."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from edgert.errors import ConfigInvalid, EdgeRTError

TIMEOUT_S = 10.0
_ANSWER_CHARS_MAX = 200


class PushFailed(EdgeRTError, code="fleet.push_failed", exit_code=6, retryable=True):
    """The endpoint did not accept the metrics. If `retryable`, the endpoint may accept them later."""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows no redirection.

    A redirected request would be a GET without the body, and would send the credentials to another host.
    """

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirection)


def http_address(option: str, url: str, path: str, example: str) -> str:
    """Return the address for POST requests: `url`, with `path` if `url` has no path. Raises ConfigInvalid."""
    if not url.startswith(("http://", "https://")):
        raise ConfigInvalid(f"{option} {url!r} is not an HTTP address: give an address such as {example}")
    host_and_path = url.split("://", 1)[1].rstrip("/")
    return url if "/" in host_and_path else url.rstrip("/") + path


def post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Post the body. Raises PushFailed."""
    try:
        with _opener.open(urllib.request.Request(url, body, dict(headers)), timeout=TIMEOUT_S) as response:
            response.read()
    except urllib.error.HTTPError as error:
        answer = error.read(_ANSWER_CHARS_MAX).decode(errors="replace").strip()
        elsewhere = error.headers.get("Location")
        detail = f", which leads to {elsewhere[:_ANSWER_CHARS_MAX]}" if elsewhere else f": {answer}" if answer else ""
        failed = PushFailed(f"{url} answered {error.code} {error.reason}{detail}; check the address and the login")
        ours = HTTPStatus.BAD_REQUEST <= error.code < HTTPStatus.INTERNAL_SERVER_ERROR
        failed.retryable = not ours or error.code == HTTPStatus.TOO_MANY_REQUESTS
        raise failed from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PushFailed(f"{url} does not accept metrics: {str(reason).strip()}; check that it runs") from error
