"""The first message on a worker's link: the version to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOrder:
    """The version that a worker must load.

    Attributes:
        folder: The slot of the version.
        digest: The digest that the version must have.
        state: The state folder.
        boot: The id of the daemon's start, for telemetry.
        previous: The folder and the digest of the previous version, if the worker must compare answers with it.
    """

    model: str
    folder: str
    digest: str
    state: str
    boot: str
    previous: tuple[str, str] | None = None
