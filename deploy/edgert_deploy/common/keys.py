"""Keys: this user's signing keys, and the public keys that the project shares.

Both halves of a key are in the user's configuration folder, or in the folder `keys` of `edgert.toml`. A project that a
team commits never has the private half. It has a copy of the public half, so that any host of the team can make devices
trust the key.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

from edgert.bundle.signing import SigningKey, read_signing_key
from edgert.durable import os_error_as, replace_file
from edgert.errors import ConfigInvalid
from edgert_deploy.common.project import Project, find_project

PRIVATE_SUFFIX = ".key.pem"
PUBLIC_SUFFIX = ".pem"
DEFAULT = "default"


def keys_dir() -> Path:
    """Return the folder of the user's signing keys."""
    return find_project().keys


def key_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of the private and the public half of key `name`."""
    return folder / f"{name}{PRIVATE_SUFFIX}", folder / f"{name}{PUBLIC_SUFFIX}"


def signing_key(given: str | None) -> SigningKey:
    """Read the user's private key. Raises ConfigInvalid.

    `given` is the name of the key or the path of its file. Without `given`, read the key `default`.
    """
    if given and is_key_file(given):
        path = Path(given)
    else:
        path = key_paths(keys_dir(), given or DEFAULT)[0]
        if not path.exists():
            raise ConfigInvalid(_no_signing_key(given or DEFAULT))
    key = read_signing_key(path)
    if others_may_use(path):
        raise ConfigInvalid(
            f"other users can read or replace the private key {path} (mode {path.stat().st_mode & 0o777:o}), so they could "
            f"sign: chmod 600 {shlex.quote(str(path))}. If another user may have copied it, make a new key (edgert keys new --name NAME)"
        )
    return key


def others_may_use(private: Path) -> bool:
    """Return whether others can read this user's key; as in ssh, other owners' keys do not count."""
    status = private.stat()
    return status.st_uid == os.geteuid() and bool(status.st_mode & 0o077)


def is_key_file(given: str) -> bool:
    """Return whether `given` is a file and not the name of a key."""
    path = Path(given)
    return path.suffix == PUBLIC_SUFFIX or path.parent != Path() or path.is_file()


def _no_signing_key(name: str) -> str:
    project = find_project()
    lacks = f"no private key {name!r} in {project.keys}"
    if others := sorted(path.name.removesuffix(PRIVATE_SUFFIX) for path in project.keys.glob(f"*{PRIVATE_SUFFIX}")):
        return f"{lacks}: choose with --key {' or --key '.join(others)}"
    if not project.is_users and key_paths(project.public_keys, name)[1].exists():
        return (
            f"{lacks}: another host of the team has it. Make a key of your own (edgert keys new --name NAME), make the devices "
            "trust it (edgert bootstrap all --key NAME), then sign with --key NAME"
        )
    return f"{lacks}: make it with edgert keys new" + ("" if name == DEFAULT else f" --name {name}")


def restore_public_halves() -> Path:
    """Write the missing public halves beside the user's private keys. Return the folder.

    Public halves are missing if a user restored only the private keys from a backup.
    """
    folder = keys_dir()
    for private in folder.glob(f"*{PRIVATE_SUFFIX}"):
        public = key_paths(private.parent, private.name.removesuffix(PRIVATE_SUFFIX))[1]
        with contextlib.suppress(OSError, ConfigInvalid):  # `signing_key` reports the error when the key is used
            if not public.exists():
                public.write_bytes(read_signing_key(private).public.pem())
    return folder


def public_key(name: str) -> Path:
    """Return the public half of key `name`, from the project, else from the user. Raises ConfigInvalid."""
    folders = find_project().public_keys, restore_public_halves()
    for folder in folders:
        path = key_paths(folder, name)[1]
        if path.exists():
            return path
    raise ConfigInvalid(f"no key {name!r} in {folders[1]}: make it with edgert keys new --name {name}")


def public_keys() -> list[Path]:
    """Return the public halves of the project's and the user's keys, sorted by name."""
    places = dict.fromkeys((find_project().public_keys.resolve(), restore_public_halves().resolve()))
    paths = [path for folder in places for path in folder.glob(f"*{PUBLIC_SUFFIX}")]
    return sorted((path for path in paths if not path.name.endswith(PRIVATE_SUFFIX)), key=lambda path: path.name)


def check_new_key(name: str, folder: Path) -> None:
    """Raise ConfigInvalid if `folder` is in the project, or if the project has a key with this name."""
    project = find_project()
    if project.is_users:
        return
    if folder.resolve().is_relative_to(project.root):
        raise ConfigInvalid(
            f"{folder} is in the project {project.root}, which a team commits: give a --dir outside the project"
        )
    if key_paths(project.public_keys, name)[1].exists():
        raise ConfigInvalid(f"the project has a key {name} already, in {project.public_keys}: give another --name")


def publish(public: Path, project: Project) -> Path | None:
    """Copy a public key to the project and return the copy. Raises ConfigInvalid.

    Return None if the project has a key of this name already, or if the project is the user's own folder.
    """
    copy = project.public_keys / public.name
    if project.is_users or copy.exists():
        return None
    advice = f"the key exists: copy the file to {copy.parent}"
    with os_error_as(ConfigInvalid, f"cannot copy {public} to the project", advice):
        copy.parent.mkdir(exist_ok=True)
        replace_file(copy, public.read_bytes(), mode=0o644, shared=True)
    return copy
