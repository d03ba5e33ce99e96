"""`edgert keys`: the Ed25519 keys that bundles are signed with."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.bundle.signing import new_key, read_public_key, write_key_pair
from edgert.cli.command import Group
from edgert.cli.output import emit, json_option, progress
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import columns, error_lines
from edgert_deploy.cli.shared.types import FolderPath
from edgert_deploy.common.keys import DEFAULT, PUBLIC_SUFFIX, check_new_key, key_paths, keys_dir, public_keys, publish
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.transports import Transport


@click.group(cls=Group)
def keys() -> None:
    """Make, list and remove the keys that sign bundles.

    \b
    Examples:
      edgert keys new
      edgert keys list
      edgert keys remove 0123456789abcdef all
    """


@keys.command()
@click.option("--name", default="default", show_default=True, metavar="NAME", help="The key's name.")
@click.option(
    "--dir",
    "folder",
    type=FolderPath(),
    help="The folder for the keys [default: `keys` of the project, else the keys folder of your configuration].",
)
@json_option
def new(name: str, folder: Path | None, as_json: bool) -> None:
    """Make a key pair; never overwrite an existing pair. A project gets a copy of the public half.

    \b
    Examples:
      edgert keys new
      edgert keys new --name factory --dir ~/keys
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigInvalid(f"key name {name!r}: use letters, digits, - and _")
    check_new_key(name, folder or keys_dir())
    private, public = key_paths(folder or keys_dir(), name)
    key = new_key()
    write_key_pair(key, private, public)
    shared = publish(public, find_project()) if folder is None else None
    key_id = key.public.key_id
    value = {"key_id": key_id, "private": str(private), "public": str(public), "shared": shared and str(shared)}
    emit(value, f"{key_id}  {shared or public}", as_json)
    if not as_json:
        progress(f"private key: {private}. Back it up: without it you cannot sign for the devices that trust this key")
        if name != DEFAULT and folder is None:
            progress(
                f"next: run edgert bootstrap SELECTOR --key {name} so that devices trust the key; sign with edgert build --key {name}"
            )


@keys.command("list")
@selector_argument(required=False)
@inventory_option
@json_option
def list_(selector: str | None, inventory: Inventory, as_json: bool) -> None:
    """List the keys of this user and the project. With SELECTOR, list the keys that devices trust.

    \b
    Examples:
      edgert keys list --json
      edgert keys list all
    """
    if selector is not None:
        _on_devices(selector, inventory, as_json, "list")
        return
    by_key = {}  # by id and name: if user and project have the same key, the list shows the user's files
    for public in public_keys():
        private, _ = key_paths(public.parent, public.name.removesuffix(PUBLIC_SUFFIX))
        key_id = read_public_key(public).key_id
        by_key[key_id, public.name] = {"key_id": key_id, "public": str(public), "can_sign": private.exists()}
    rows = list(by_key.values())
    lines = [f"{r['key_id']}  {r['public']}  {'can sign' if r['can_sign'] else 'public key only'}" for r in rows]
    if rows or as_json:
        emit({"keys": rows}, "\n".join(lines), as_json)
    else:
        progress("no keys yet; make one with: edgert keys new")


@keys.command()
@click.argument("key")
@selector_argument()
@click.option("--force", is_flag=True, help="Remove the key even if it is the only key that the device trusts.")
@inventory_option
@json_option
def remove(key: str, selector: str, force: bool, inventory: Inventory, as_json: bool) -> None:
    """Remove KEY (the id of a key) from the keys that devices trust.

    The devices then refuse new bundles that this key signed. Installed versions stay and serve. The key's files on this
    host also stay. Pass another --key to later bootstraps; otherwise a bootstrap installs the removed key again.

    \b
    Example:
      edgert keys remove 0123456789abcdef all
    """
    _on_devices(selector, inventory, as_json, "remove", key, *(["--force"] if force else []))


def _on_devices(selector: str, inventory: Inventory, as_json: bool, *words: str) -> None:
    """Run `edgertd keys WORDS` on each device. Print the keys that each device then trusts."""

    def ask(device: Device, transport: Transport) -> dict[str, list[str]]:
        answer = RemoteDaemon(transport, device).call("keys", *words)
        trusted = [key["key_id"] if isinstance(key, dict) else str(key) for key in answer["keys"]]
        return {"keys": trusted, "damaged": answer.get("damaged", [])}

    results = run_on_each(inventory.select(selector), ask)
    cells = [("DEVICE", "TRUSTED KEYS")]
    cells += [
        (name, "-" if isinstance(answer, EdgeRTError) else ", ".join(answer["keys"]) or "none")
        for name, answer in results.answers
    ]
    damaged = [(name, "damaged", file_name) for name, answer in results.good for file_name in answer["damaged"]]
    results.show(columns(cells), as_json, below=error_lines(damaged).rstrip("\n"))
