"""Find the folders that EdgeRT keeps for a user of this host."""

from __future__ import annotations

import os
from pathlib import Path


def config_folder() -> Path:
    """Return $EDGERT_CONFIG_DIR, else ~/.config/edgert: the user's keys and inventory."""
    given = os.environ.get("EDGERT_CONFIG_DIR")
    return Path(given) if given else Path.home() / ".config" / "edgert"


def rollouts_folder() -> Path:
    """Return the folder that keeps how far this user's rollouts came."""
    return config_folder() / "rollouts"


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/edgert, else ~/.cache/edgert. It may be removed at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgert"
