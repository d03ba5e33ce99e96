"""Signed documents as canonical JSON: manifests, channel statements, releases of the runtime.

Keys are sorted, there are no spaces, and text is ASCII, so the same document always has the same bytes. Each class
checks its values when an instance is created.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypeVar

from edgert.errors import EdgeRTError
from edgert.typed_json import Mistyped, UnknownKey, from_json

FORMAT = 1

T = TypeVar("T")


def document_bytes(document: Any) -> bytes:
    """Return the bytes of a dataclass, for its signature."""
    value = {"format": FORMAT, **asdict(document)}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_document(cls: type[T], data: bytes, what: str, fault: type[EdgeRTError], update: str) -> T:
    """Return the document in signed bytes.

    Raises `fault` if the document cannot be read. For a document of a newer version, the message ends with `update`,
    the next step; `what` names the document.
    """
    try:
        value = json.loads(data)
        if (format_read := value.pop("format")) != FORMAT:
            raise fault(f"{what} has format {str(format_read)[:40]!r}; this version reads {FORMAT}: {update}")
        return from_json(cls, value)
    except UnknownKey as error:  # not ignored: the key might change the device's choice or a model's input
        raise fault(f"{what} cannot be read ({error}): {update}") from error
    except Mistyped as error:
        if isinstance(error.__cause__, fault):  # the value has the right type, but is not allowed
            raise error.__cause__ from None
        raise fault(f"{what} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise fault(f"{what} cannot be read: {type(error).__name__}") from error
