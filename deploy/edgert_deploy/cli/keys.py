"""`edgert keys`: the Ed25519 keys that bundles are signed with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from edgert.bundle.signing import new_key, read_public_key, write_key_pair
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option
from edgert_deploy.common.keys import PUBLIC_SUFFIX, key_paths, keys_dir, public_keys
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports import open_transport


@click.group()
def keys() -> None:
    """Make and list the keys that bundles are signed with; have devices trust one no more.

    \b
    Examples:
      edgert keys new
      edgert keys list
      edgert keys remove 0123456789abcdef --on all
    """


@keys.command()
@click.option("--name", default="default", show_default=True, help="What to call the key.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where to put it (default: the user's configuration)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def new(name: str, folder: Path | None, as_json: bool) -> None:
    """Make a key pair; an existing one is never overwritten.

    \b
    Examples:
      edgert keys new
      edgert keys new --name factory --dir keys
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigInvalid(f"key name {name!r}: use letters, digits, - and _")
    private, public = key_paths(folder or keys_dir(), name)
    key = new_key()
    write_key_pair(key, private, public)
    if as_json:
        click.echo(json.dumps({"key_id": key.public.key_id, "private": str(private), "public": str(public)}))
        return
    click.echo(f"{key.public.key_id}  {public}")
    click.echo(
        f"private key: {private} (keep it on this host, and back it up: devices trust only what it signs)", err=True
    )


@keys.command("list")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where they are (default: the user's configuration)."
)
@click.option("--on", "selector", help="Devices whose trusted keys to list instead: names, groups or `all`.")
@inventory_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path | None, selector: str | None, inventory_file: Path | None, as_json: bool) -> None:
    """List key pairs: id, public half, and whether the private half is here. With --on, what devices trust.

    \b
    Examples:
      edgert keys list --json
      edgert keys list --on all
    """
    if selector is not None:
        _on_devices(selector, inventory_file, as_json, "list")
        return
    rows = []
    for public in public_keys(folder or keys_dir()):
        private, _ = key_paths(public.parent, public.name.removesuffix(PUBLIC_SUFFIX))
        rows.append({"key_id": read_public_key(public).key_id, "public": str(public), "can_sign": private.exists()})
    if as_json:
        click.echo(json.dumps({"keys": rows}))
        return
    for row in rows:
        click.echo(f"{row['key_id']}  {row['public']}  {'can sign' if row['can_sign'] else 'public half only'}")
    if not rows:
        click.echo("no keys yet; make one with: edgert keys new", err=True)


@keys.command()
@click.argument("key")
@click.option(
    "--on", "selector", required=True, help="Devices: names, groups, tag:KEY, site:NAME or `all`, with commas."
)
@click.option("--force", is_flag=True, help="Also where it is the only key that the device trusts.")
@inventory_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def remove(key: str, selector: str, force: bool, inventory_file: Path | None, as_json: bool) -> None:
    """Have devices trust KEY (its id) no more: they refuse what it signed from now on.

    What is installed already stays, and is served. The key's own files on this host stay, too; a bootstrap brings
    the keys that it is given back, so give it others (--key).

    \b
    Example:
      edgert keys remove 0123456789abcdef --on all
    """
    _on_devices(selector, inventory_file, as_json, "remove", key, *(["--force"] if force else []))


def _on_devices(selector: str, inventory_file: Path | None, as_json: bool, *words: str) -> None:
    """`edgertd keys WORDS` on each device, and what each then trusts."""
    rows: list[dict[str, Any]] = []
    failed: list[EdgeRTError] = []
    devices = find_inventory(inventory_file).select(selector)
    for device in devices:
        try:
            rows.append({"device": device.name, **_asked(device, words)})
        except EdgeRTError as error:
            failed.append(error)
            rows.append({"device": device.name, "error": {"code": error.code, "message": error.message}})
    if failed and len(devices) == 1:
        raise failed[0]
    cells = [("DEVICE", "TRUSTED KEYS")]
    cells += [(row["device"], "-" if "error" in row else ", ".join(row["keys"]) or "none") for row in rows]
    errors = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in rows if "error" in row]
    errors += [(row["device"], "damaged", complaint) for row in rows for complaint in row.get("damaged", ())]
    emit({"ok": not failed, "devices": rows}, f"{columns(cells)}\n{error_lines(errors)}".rstrip("\n"), as_json)
    click.get_current_context().exit(failed[0].exit_code if failed else 0)


def _asked(device: Device, words: Sequence[str]) -> dict[str, Any]:
    transport = open_transport(device)
    try:
        answer = RemoteDaemon(transport, device).call("keys", *words)
    finally:
        transport.close()
    trusted = [key["key_id"] if isinstance(key, dict) else str(key) for key in answer["keys"]]
    return {"keys": trusted, "damaged": answer.get("damaged", [])}
