"""An HTTP request and its response, as the endpoints see them, and the error that becomes a response."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from edgert.errors import (
    DeadlineExceeded,
    EdgeRTError,
    ModelNotFound,
    NotAllowed,
    RequestError,
    Unavailable,
)

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class HttpRequest:
    """`headers` are by lower-case name. `body` is valid until the response has been sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: memoryview


@dataclass(frozen=True)
class HttpResponse:
    """`parts` are sent one after the other as the body."""

    status: int
    parts: Sequence[bytes | memoryview] = ()
    content_type: str = JSON_TYPE
    headers: tuple[tuple[str, str], ...] = ()


class HttpError(Exception):
    """The request ends with `status` and `message`; `retry_after_s` says when another may do better."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_s, self.allow = status, message, retry_after_s, allow

    @classmethod
    def of(cls, error: EdgeRTError) -> HttpError:
        """What the daemon's `error` is in HTTP's terms."""
        if isinstance(error, Unavailable):
            return cls(HTTPStatus.SERVICE_UNAVAILABLE, error.message, error.retry_after_s or RETRY_AFTER_S)
        for kind, status in _STATUS.items():
            if isinstance(error, kind):
                return cls(status, error.message)
        return cls(HTTPStatus.INTERNAL_SERVER_ERROR, error.message)

    def response(self) -> HttpResponse:
        headers: tuple[tuple[str, str], ...] = (("Allow", self.allow),) if self.allow else ()
        if self.retry_after_s is not None:  # the header knows whole seconds only
            headers += (("Retry-After", str(max(1, math.ceil(self.retry_after_s)))),)
        return HttpResponse(self.status, (json.dumps({"error": self.message}).encode(),), headers=headers)


# The first class that fits decides.
_STATUS: dict[type[EdgeRTError], HTTPStatus] = {
    ModelNotFound: HTTPStatus.NOT_FOUND,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    NotAllowed: HTTPStatus.FORBIDDEN,
    RequestError: HTTPStatus.BAD_REQUEST,
}


def json_response(value: Any, status: int = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, (json.dumps(value).encode(),))
