"""The first message of a worker's channel: what the worker loads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOrder:
    """The version to load: its slot's folder, the digest that it must have; the state folder, the daemon's boot id.

    `previous` is the folder and the digest of the version before, if the answers of the two are to be compared.
    """

    model: str
    folder: str
    digest: str
    state: str
    boot: str
    previous: tuple[str, str] | None = None
