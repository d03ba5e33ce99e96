"""`edgert keys`: the Ed25519 keys that bundles are signed with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgert.errors import ConfigInvalid
from edgert.signing import new_key, read_public_key, write_key_pair
from edgert_deploy.inventory import config_folder
from edgert_deploy.project import find_project

PRIVATE_SUFFIX = ".key.pem"
PUBLIC_SUFFIX = ".pem"


def keys_dir() -> Path:
    """Where the project says, else `keys` in $EDGERT_CONFIG_DIR, else in ~/.config/edgert."""
    project = find_project()
    return project.keys if project is not None and project.keys is not None else config_folder() / "keys"


@click.group()
def keys() -> None:
    """Make and list the keys that bundles are signed with.

    \b
    Examples:
      edgert keys new
      edgert keys list
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path | None, as_json: bool) -> None:
    """List key pairs: id, public half, and whether the private half is here.

    \b
    Example:
      edgert keys list --json
    """
    rows = []
    for public in sorted((folder or keys_dir()).glob(f"*{PUBLIC_SUFFIX}")):
        if public.name.endswith(PRIVATE_SUFFIX):
            continue
        private = public.with_name(public.name.removesuffix(PUBLIC_SUFFIX) + PRIVATE_SUFFIX)
        rows.append({"key_id": read_public_key(public).key_id, "public": str(public), "can_sign": private.exists()})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(f"{row['key_id']}  {row['public']}  {'can sign' if row['can_sign'] else 'public half only'}")
    if not rows:
        click.echo("no keys yet; make one with: edgert keys new", err=True)


def key_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Where the private and the public half of key `name` lie in `folder`."""
    return folder / f"{name}{PRIVATE_SUFFIX}", folder / f"{name}{PUBLIC_SUFFIX}"
