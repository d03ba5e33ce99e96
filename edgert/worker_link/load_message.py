"""The first message on a worker's link: the version to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadMessage:
    """Tells a worker which version to load.

    `folder` is the slot of the version, and `digest` the required digest of its manifest. `boot` is the id of the
    daemon's run. If the worker must compare its answers with the previous version, `previous` has the folder and the
    digest of the previous version.
    """

    model: str
    folder: str
    digest: str
    state_dir: str
    boot: str
    previous: tuple[str, str] | None = None
