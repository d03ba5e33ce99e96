"""Signed documents as canonical JSON: manifests, channel statements, releases of the runtime.

Keys are sorted, there are no spaces, and text is ASCII, so the same document always has the same bytes. Each class
checks its values when an instance is created.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeVar

from edgert.errors import BundleError, EdgeRTError
from edgert.typed_json import Mistyped, UnknownKey, from_json

FORMAT = 1

D = TypeVar("D", bound="Document")


@dataclass(frozen=True)
class Document:
    """A signed dataclass. Errors name it `WHAT`; `UPDATE` is the next step if its version is newer."""

    WHAT: ClassVar[str]
    FAULT: ClassVar[type[EdgeRTError]] = BundleError
    UPDATE: ClassVar[str] = "update edgert on the device"

    def to_bytes(self) -> bytes:
        value = {"format": FORMAT, **asdict(self)}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls: type[D], data: bytes) -> D:
        """Return the document in signed bytes. Raises FAULT if the document cannot be read."""
        what, fault = cls.WHAT, cls.FAULT
        try:
            value = json.loads(data)
            if (format_read := value.pop("format")) != FORMAT:
                raise fault(f"{what} has format {str(format_read)[:40]!r}; this version reads {FORMAT}: {cls.UPDATE}")
            return from_json(cls, value)
        except UnknownKey as error:  # not ignored: the key might change the device's choice or a model's input
            raise fault(f"{what} cannot be read ({error}): {cls.UPDATE}") from error
        except Mistyped as error:
            if isinstance(error.__cause__, fault):  # the value has the right type, but is not allowed
                raise error.__cause__ from None
            raise fault(f"{what} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise fault(f"{what} cannot be read: {type(error).__name__}") from error
