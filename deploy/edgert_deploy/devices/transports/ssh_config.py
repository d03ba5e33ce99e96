"""The user's ~/.ssh/config, and the private keys that it or the inventory names."""

from __future__ import annotations

import base64
import contextlib
import glob
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.config import SSHConfig

from edgert.errors import ConfigInvalid

INCLUDES_MAX = 64
CONFIG_BYTES_MAX = 1024**2
_KEY_HEAD_BYTES = 256  # they include "-----BEGIN OPENSSH PRIVATE KEY-----" and the like


def read_ssh_config() -> SSHConfig:
    """Return the user's and the system's SSH configuration, includes resolved. Raises ConfigInvalid."""
    config = SSHConfig()
    for path in (Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")):
        try:
            config.parse(iter(_lines(path, path.parent, [INCLUDES_MAX])))
        except (paramiko.SSHException, OSError, ValueError) as error:
            raise ConfigInvalid(f"{path} is not a valid ssh configuration: {error}") from error
    return config


def login_keys(settings: Any, identity: str) -> dict[str, Any]:
    """Return paramiko's options for the login. Missing files of ~/.ssh/config are skipped."""
    if identity:
        _check_identity(Path(identity).expanduser())
    named = [identity, *settings.get("identityfile", [])] if identity else settings.get("identityfile", [])
    files = [str(path) for path in (Path(name).expanduser() for name in named) if path.is_file()]
    if settings.get("identitiesonly", "no").lower() != "yes":
        return {"key_filename": files}
    # Servers refuse a login after a few wrong keys: offer only these, from the agent if it has one.
    held = _held_by_agent(files)
    return {"key_filename": files, "allow_agent": False, "look_for_keys": False, **({"pkey": held} if held else {})}


def _check_identity(path: Path) -> None:
    """Raise ConfigInvalid if the file is no private key. Whether the key is accepted, the server decides."""
    if not path.is_file():
        raise ConfigInvalid(f"identity {path} is missing: give the private key's path")
    try:
        with path.open("rb") as file:
            head = file.read(_KEY_HEAD_BYTES)
    except OSError as error:
        raise ConfigInvalid(f"identity {path} cannot be read: {error.strerror}") from error
    if b"PRIVATE KEY" in head:
        return
    private = path.with_suffix("")
    hint = f": give {private}" if path.suffix == ".pub" and private.is_file() else ": give the private key's path"
    raise ConfigInvalid(f"identity {path} is {'a public' if path.suffix == '.pub' else 'no private'} key{hint}")


def _held_by_agent(files: list[str]) -> paramiko.PKey | None:
    blobs = {_public_blob(Path(f"{file}.pub")) for file in files} - {b""}
    with contextlib.suppress(paramiko.SSHException, OSError):
        return next((key for key in paramiko.Agent().get_keys() if key.asbytes() in blobs), None)
    return None


def _public_blob(path: Path) -> bytes:
    try:
        return base64.b64decode(path.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _lines(path: Path, folder: Path, left: list[int]) -> Iterator[str]:
    """Yield the lines of a configuration, with those of included files in place; none for a missing file."""
    if not path.is_file():
        return
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ConfigInvalid(f"{path} has more than {CONFIG_BYTES_MAX} bytes")
    section = "Host *"
    for line in path.read_text(errors="replace").splitlines():  # a comment may be in another encoding
        keyword, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() != "include":
            section = line if keyword.lower() in ("host", "match") else section
            yield line
            continue
        for name in [name for word in shlex.split(rest) for name in _files(word, folder)]:
            left[0] -= 1
            if left[0] < 0:
                raise ConfigInvalid(f"{path} includes more than {INCLUDES_MAX} files, or itself")
            yield from _lines(name, folder, left)
        yield section  # the following lines belong to the section before the include


def _files(pattern: str, folder: Path) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(str(folder / Path(pattern).expanduser())))]
