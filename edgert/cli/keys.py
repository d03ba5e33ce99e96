"""`edgertd keys`: the keys whose bundles this device takes."""

from __future__ import annotations

import click

from edgert.bundle.signing import read_keyring
from edgert.cli.output import emit
from edgert.config import StateDir, read_config
from edgert.durable import sync_folder
from edgert.errors import ConfigInvalid, StorageFailed, TransitionRefused


@click.group()
def keys() -> None:
    """List the keys whose bundles this device takes, or trust one no more.

    \b
    Examples:
      edgertd keys list
      edgertd keys remove 0123456789abcdef
    """


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def list_(state: StateDir, as_json: bool) -> None:
    """List trusted keys, and files that should hold one and do not.

    \b
    Example:
      edgertd keys list --json
    """
    read_config(state)  # says so where nothing was set up here
    ring = read_keyring(state.keys)
    rows = [{"key_id": key.key_id, "file": str(path)} for path, key in ring.keys.items()]
    lines = [*(f"{row['key_id']}  {row['file']}" for row in rows), *(f"warning: {c}" for c in ring.complaints)]
    emit({"keys": rows, "damaged": ring.complaints}, "\n".join(lines) or f"{state.keys} holds no key", as_json)


@keys.command()
@click.argument("key")
@click.option("--force", is_flag=True, help="Also the last one: then no bundle is taken until a bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def remove(state: StateDir, key: str, force: bool, as_json: bool) -> None:
    """Trust KEY no more: its id, or the name of a file in the folder of keys.

    Bundles signed with it are refused from now on. What is installed already stays, and is served: deploy another
    release where it was signed by somebody else.

    \b
    Examples:
      edgertd keys remove 0123456789abcdef
      edgertd keys remove damaged.pem
    """
    read_config(state)
    ring = read_keyring(state.keys)
    going = [path for path, held in ring.keys.items() if key in (held.key_id, path.name)]
    staying = [path for path in ring.keys if path not in going]
    going += [path for path in ring.damaged if path.name == key]
    if not going:
        known = ", ".join(sorted({held.key_id for held in ring.keys.values()})) or "none"
        raise ConfigInvalid(f"no key is called {key[:80]!r} here; trusted are: {known}")
    if ring.keys and not staying and not force:
        raise TransitionRefused(
            f"{key} is the only key trusted here: bootstrap with another first (edgert bootstrap --key), or --force"
        )
    try:
        for path in going:
            path.unlink(missing_ok=True)
        sync_folder(state.keys)
    except OSError as error:
        raise StorageFailed(f"cannot remove {key} from {state.keys}: {error.strerror}") from error
    left = sorted({ring.keys[path].key_id for path in staying})
    emit({"removed": key, "keys": left}, f"{key} is trusted no more; trusted are: {', '.join(left) or 'none'}", as_json)
