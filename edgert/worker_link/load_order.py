"""The first message of a worker's link: what the worker loads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOrder:
    """The version to load: its slot's `folder` and required `digest`, the state folder, the boot's id.

    `previous` is the folder and the digest of the previous version, if the answers of the two are to be compared.
    """

    model: str
    folder: str
    digest: str
    state: str
    boot: str
    previous: tuple[str, str] | None = None
