"""What makes a change on disk survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make renames and creations in `path` last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
