"""`edgertd keys`: the keys whose bundles this device accepts."""

from __future__ import annotations

import os

import click

from edgert.cli.output import emit, json_option
from edgert.config import read_config
from edgert.durable import storing, sync_folder
from edgert.errors import ConfigInvalid, TransitionRefused
from edgert.state_dir import StateDir
from edgert.versions.trust import trusted_keys


@click.group()
def keys() -> None:
    """List the keys whose bundles this device accepts, or remove one.

    \b
    Examples:
      edgertd keys list
      edgertd keys remove 0123456789abcdef
    """


@keys.command("list")
@json_option
@click.pass_obj
def list_(state: StateDir, as_json: bool) -> None:
    """List the trusted keys, and key files that are damaged.

    \b
    Example:
      edgertd keys list --json
    """
    read_config(state)  # raises if the device is not set up
    ring = trusted_keys(state)
    rows = [{"key_id": key.key_id, "file": str(path)} for path, key in ring.keys.items()]
    lines = [*(f"{row['key_id']}  {row['file']}" for row in rows), *(f"warning: {c}" for c in ring.warnings)]
    emit({"keys": rows, "damaged": ring.warnings}, "\n".join(lines) or f"{state.keys} contains no key", as_json)


@keys.command()
@click.argument("key")
@click.option(
    "--force", is_flag=True, help="Remove the last key too: the device then accepts no bundle until a bootstrap."
)
@json_option
@click.pass_obj
def remove(state: StateDir, key: str, force: bool, as_json: bool) -> None:
    """Remove KEY, given as its id or as the name of a file in the key folder.

    The device then refuses bundles that this key signed. Installed versions continue to serve: if the key was stolen,
    deploy another release.

    \b
    Examples:
      edgertd keys remove 0123456789abcdef
      edgertd keys remove damaged.pem
    """
    read_config(state)
    ring = trusted_keys(state)
    removed = [path for path, trusted in ring.keys.items() if key in (trusted.key_id, path.name)]
    remaining = [path for path in ring.keys if path not in removed]
    removed += [path for path in ring.damaged if path.name == key]
    if not removed:
        known = ", ".join(sorted({trusted.key_id for trusted in ring.keys.values()})) or "none"
        raise ConfigInvalid(f"unknown key {key[:80]!r}; this device trusts: {known}")
    if ring.keys and not remaining and not force:
        raise TransitionRefused(
            f"{key} is the only trusted key: add another key (edgert bootstrap --key), or use --force"
        )
    with storing(f"cannot remove {key} from {state.keys}"):
        # Root may run this command, and another user may replace the folder by a link. O_NOFOLLOW refuses a link.
        folder = os.open(state.keys, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for path in removed:
                os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)
        sync_folder(state.keys)
    key_ids = sorted({ring.keys[path].key_id for path in remaining})
    text = f"{key} is removed; trusted keys: {', '.join(key_ids) or 'none'}"
    emit({"removed": key, "keys": key_ids}, text, as_json)
