"""The HELLO frame: the model that a client wants, and what kind of connection it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgert.protocol import wire


class HelloFlags(NamedTuple):
    """The kind of connection that a client asks for.

    Attributes:
        shared: Whether the client can use shared memory.
        probe: Whether the client is a check or a benchmark. Telemetry counts its requests separately.
        session: Whether each request continues the previous request.
    """

    shared: bool = False
    probe: bool = False
    session: bool = False

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> HelloFlags:
        """Return the flags in `content`, which may have other keys; a value other than true counts as false."""
        return cls(*(content.get(name) is True for name in cls._fields))

    def to_json(self) -> dict[str, bool]:
        """Return the flags that are set."""
        return {name: True for name, value in self._asdict().items() if value}


NO_FLAGS = HelloFlags()


def hello_frame(model: str | None, flags: HelloFlags) -> bytes:
    """Return a HELLO to `model`; to the daemon itself if `model` is None."""
    return wire.json_frame(wire.HELLO, {"model": model, **flags.to_json()})
