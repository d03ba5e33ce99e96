"""The first message on a worker's link: the version to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOrder:
    """The version to load: its slot's `folder` and required `digest`, the state folder, the boot's id.

    `previous` is the folder and the digest of the previous version, if the worker compares the answers of both.
    """

    model: str
    folder: str
    digest: str
    state: str
    boot: str
    previous: tuple[str, str] | None = None
