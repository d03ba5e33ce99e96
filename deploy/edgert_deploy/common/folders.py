"""Find the folders that EdgeRT keeps for a user of this host."""

from __future__ import annotations

import os
from pathlib import Path


def config_folder() -> Path:
    """Return $EDGERT_CONFIG_DIR, else ~/.config/edgert: signing keys, and the user's own project."""
    given = os.environ.get("EDGERT_CONFIG_DIR")
    return Path(given) if given else Path.home() / ".config" / "edgert"


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/edgert, else ~/.cache/edgert. It may be removed at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return ((Path(base) if base else Path.home() / ".cache") / "edgert").absolute()
