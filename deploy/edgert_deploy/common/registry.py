"""The registry that a project publishes to, with the user's login."""

from __future__ import annotations

import os
from pathlib import Path

from edgert.errors import ConfigInvalid
from edgert.registry.address import parse_repository
from edgert.registry.client import Registry
from edgert.registry.login import read_credentials


def open_registry(address: str, ca: Path | None, login: Path | None) -> Registry:
    """Return the registry at `address`. Without `login`, use the user's login file. Raises ConfigInvalid."""
    if not address:
        raise ConfigInvalid(
            "no registry is given: add --registry oci://HOST/REPOSITORY, or write it as address under [registry] in "
            "edgert.toml"
        )
    repository = parse_repository(address)
    return Registry(repository, read_credentials(login or _users_login(), repository.host), ca)


def _users_login() -> Path | None:
    """Return the file in which docker, podman and skopeo store a user's logins, if it exists."""
    folder = os.environ.get("DOCKER_CONFIG")
    file = Path(folder or os.path.expanduser("~/.docker")) / "config.json"
    return file if file.is_file() else None
