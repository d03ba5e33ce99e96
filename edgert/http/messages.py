"""HTTP requests and responses for the endpoints, and the error that becomes a response."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote

from edgert.errors import DeadlineExceeded, EdgeRTError, ModelNotFound, NotAllowed, RequestError, Unavailable

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
RETRY_AFTER_S = 1.0


class HttpRequest(NamedTuple):
    """A request. `headers` are by lower-case name. `body` is valid until the response has been sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: memoryview

    @property
    def path(self) -> str:
        target = self.target.partition("?")[0]
        if target[:7].lower() == "http://":  # the absolute form, which a server must accept (RFC 9112, 3.2.2)
            target = "/" + target[7:].partition("/")[2]
        return unquote(target)


class HttpResponse(NamedTuple):
    """A response. The body is sent part by part.

    `stream` has further parts of a body whose length is not known; the connection closes after the last part. With
    `closes`, the connection closes after the response.
    """

    status: int
    parts: Sequence[bytes | memoryview] = ()
    content_type: str = JSON_TYPE
    headers: tuple[tuple[str, str], ...] = ()
    stream: Generator[bytes, None, None] | None = None
    closes: bool = False

    def head(self, keep_alive: bool) -> bytes:
        """Return the status line and the fields, up to the blank line."""
        unsized = self.stream is not None or self.status == HTTPStatus.NOT_MODIFIED
        size = "" if unsized else f"Content-Length: {sum(map(len, self.parts))}\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        close = "" if keep_alive else "Connection: close\r\n"
        return (
            f"HTTP/1.1 {self.status} {_REASONS.get(self.status, '')}\r\nDate: {_date()}\r\n"
            f"Content-Type: {self.content_type}\r\n{size}{fields}{close}\r\n"
        ).encode("latin-1")


class HttpError(Exception):
    """A response with `status` and `message`. The client may repeat the request after `retry_after_s`."""

    def __init__(
        self, status: int, message: str, retry_after_s: float | None = None, allow: str = "", *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.closes = closes
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.allow = allow

    @classmethod
    def of(cls, error: EdgeRTError) -> HttpError:
        """Return the daemon's `error` as an HTTP error."""
        if isinstance(error, Unavailable):
            return cls(HTTPStatus.SERVICE_UNAVAILABLE, error.message, error.retry_after_s or RETRY_AFTER_S)
        for kind, status in _STATUS.items():
            if isinstance(error, kind):
                return cls(status, error.message)
        return cls(HTTPStatus.INTERNAL_SERVER_ERROR, error.message)

    def response(self) -> HttpResponse:
        headers: tuple[tuple[str, str], ...] = (("Allow", self.allow),) if self.allow else ()
        if self.retry_after_s is not None:  # the field has whole seconds
            headers += (("Retry-After", str(max(1, math.ceil(self.retry_after_s)))),)
        return HttpResponse(
            self.status, (json.dumps({"error": self.message}).encode(),), headers=headers, closes=self.closes
        )


# The first class that matches decides.
_STATUS: dict[type[EdgeRTError], HTTPStatus] = {
    ModelNotFound: HTTPStatus.NOT_FOUND,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    NotAllowed: HTTPStatus.FORBIDDEN,
    RequestError: HTTPStatus.BAD_REQUEST,
}


_REASONS = {status.value: status.phrase for status in HTTPStatus}
_dated: tuple[int, str] = (0, "")


def json_response(value: Any) -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, (json.dumps(value).encode(),))


def _date() -> str:
    """Return the Date field, formatted once a second."""
    global _dated
    now_s = int(time.time())
    if _dated[0] != now_s:
        _dated = (now_s, formatdate(now_s, usegmt=True))
    return _dated[1]
