"""The signing keys of this host: where they are, and which there are."""

from __future__ import annotations

from pathlib import Path

from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.project import find_project

PRIVATE_SUFFIX = ".key.pem"
PUBLIC_SUFFIX = ".pem"


def keys_dir() -> Path:
    """Return the project's folder of keys, else `keys` in $EDGERT_CONFIG_DIR or ~/.config/edgert."""
    project = find_project()
    return project.keys if project is not None and project.keys is not None else config_folder() / "keys"


def key_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of the private and the public half of key `name`."""
    return folder / f"{name}{PRIVATE_SUFFIX}", folder / f"{name}{PUBLIC_SUFFIX}"


def public_keys(folder: Path) -> list[Path]:
    """Return the public halves in `folder`, sorted by name."""
    return [path for path in sorted(folder.glob(f"*{PUBLIC_SUFFIX}")) if not path.name.endswith(PRIVATE_SUFFIX)]
