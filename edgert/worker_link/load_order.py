"""The first message on a worker's link: the version to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOrder:
    """The version to load: its slot's `folder` and required `digest`, the state folder, the boot's id.

    If the worker must compare answers with the previous version, `previous` is that version's folder and digest.
    """

    model: str
    folder: str
    digest: str
    state: str
    boot: str
    previous: tuple[str, str] | None = None
