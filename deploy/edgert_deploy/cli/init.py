"""`edgert init`: make a folder the project of a fleet."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from edgert.bundle.signing import new_key, write_key_pair
from edgert.cli.output import emit, json_option, progress
from edgert.errors import ConfigInvalid
from edgert.printable import file_error
from edgert_deploy.cli.shared.types import FolderPath
from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.keys import key_paths, publish
from edgert_deploy.common.project import FILE_NAME, INVENTORY, KEYS, find_project, find_root

PROJECT = """\
# A project of EdgeRT. Commands in this folder, or below it, use these values for options that you omit.
# A team commits this folder: paths are relative to it, and secrets do not belong here. Durations have a unit: 90s, 2h.

# inventory = "inventory.toml"         # the fleet
# selector = "all"                     # the default SELECTOR of bootstrap, deploy, bench, status and doctor
# bundles = "bundles"                  # folder of the bundles that you name without a path
# profiles = "profiles"                # device profiles of your own
# store = "postgresql://ops@db/fleet"  # the store of edgert fleet record; it also shares rollouts between hosts
# keys = "~/.config/edgert/keys"       # signing keys; never in this folder

# [broker]                             # the devices report to it; fleet, bootstrap and doctor use it
# address = "10.0.0.1:8883"
# tls = true
# ca = "ca.pem"                        # the CA that signed its certificate, if no public CA did
# username = "edge"
# password_file = "~/.config/edgert/mqtt-password"

# [registry]                           # of publish, publish-runtime, promote and channel
# address = "oci://registry.example.org/plant/models"

# [trial]                              # limits of a version on trial; a device rolls back a version that breaks one
# watch = "10m"
# error_share = "0.1%"

# [trial.digits]                       # the limits for one model
# p99_ms = 8

# [p99_target_ms]                      # 99 % of a model's requests should be answered within this time in ms
# digits = 20
"""
FLEET = """\
# The fleet: one table for each device. `edgert device add NAME USER@HOST` writes here and keeps comments and order.
"""
IGNORED = ("*.edgert", "*.key.pem", ".inventory.toml.lock", "bundles/", "fleet.db*")


@click.command()
@click.argument("folder", default=".", metavar="[DIR]", type=FolderPath())
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Make DIR (default: this folder) a project: write edgert.toml, inventory.toml and .gitignore.

    If you have no signing key, the command makes a key in your own configuration folder, outside of the project. The
    command copies the public half of your key to keys/. A team commits the folder. Existing files do not change, so you
    may repeat the command.

    \b
    Examples:
      edgert init
      edgert init ~/fleet
    """
    try:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        above = find_root(folder.parent)
        files = {FILE_NAME: PROJECT, INVENTORY: FLEET, ".gitignore": "\n".join((*IGNORED, ""))}
        written = [name for name, text in files.items() if _write_new(folder / name, text)]
        lines = (folder / ".gitignore").read_text(errors="replace").split()
    except OSError as error:
        raise ConfigInvalid(
            f"cannot make {folder} a project: {file_error(error, str(folder))}. Correct this, or give another folder"
        ) from error
    project = find_project(folder)  # this also reports a fault in an existing file
    private, public = key_paths(project.keys, "default")
    shared = project.public_keys / public.name
    if not private.exists() and not public.exists() and not shared.exists():
        write_key_pair(new_key(), private, public)
        written.append(str(private))
    if public.exists() and publish(public, project):
        written.append(f"{KEYS}/{shared.name}")
    stayed = [name for name in files if name not in written]
    text = f"{folder} is a project; made: {', '.join(written) or 'nothing, everything existed'}"
    emit({"project": str(folder), "made": written, "stayed": stayed, "key": str(shared)}, text, as_json)
    if above is not None:
        progress(f"note: {folder} is inside the project {above}; its own {FILE_NAME} applies here")
    users = config_folder() / INVENTORY
    if INVENTORY in written and users.exists():
        progress(f"note: your devices so far are in {users}: copy this file here, or pass --inventory")
    if lacking := [line for line in IGNORED if line not in lines]:
        progress(f"note: .gitignore existed; add to it: {', '.join(lacking)}")
    if private.exists():
        progress(f"signing key: {private} (back it up: devices trust only bundles that this key signs)")
    else:
        progress(f"signing key: {shared} is public; the private half of it is not on this host")
    progress("next: edgert device add NAME USER@HOST, then edgert doctor")


def _write_new(path: Path, text: str) -> bool:
    """Write a file if it does not exist. Return whether the function wrote it."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:  # an incomplete file would look like the user's own file
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return True
