"""The folders of EdgeRT for a user of this host, by the XDG specification."""

from __future__ import annotations

import os
from pathlib import Path

from edgert.machine import in_home


def config_folder() -> Path:
    """Return the folder of signing keys and of the user's own project.

    It is $EDGERT_CONFIG_DIR, else $XDG_CONFIG_HOME/edgert, else ~/.config/edgert.
    """
    folder = os.environ.get("EDGERT_CONFIG_DIR")
    return Path(folder) if folder else _base("XDG_CONFIG_HOME", ".config") / "edgert"


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/edgert, else ~/.cache/edgert. The user may remove this folder at any time."""
    return _base("XDG_CACHE_HOME", ".cache") / "edgert"


def state_folder() -> Path:
    """Return $XDG_STATE_HOME/edgert, else ~/.local/state/edgert."""
    return _base("XDG_STATE_HOME", ".local/state") / "edgert"


def _base(variable: str, below_home: str) -> Path:
    """Return the folder that `variable` names, else the folder `below_home` of the home folder.

    Raises ConfigInvalid if neither the variable nor the home folder is known.
    """
    folder = os.environ.get(variable, "")
    if os.path.isabs(folder):  # the specification says to ignore relative paths
        return Path(folder)
    return in_home(f"~/{below_home}", f"Set HOME or {variable}")
