"""`edgert init`: a folder for a fleet."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from edgert.bundle.signing import new_key, write_key_pair
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.fleet_options import emit, json_option
from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.keys import key_paths, keys_dir
from edgert_deploy.common.project import FILE_NAME, INVENTORY, find_project

PROJECT = """\
# A project of EdgeRT: commands given in this folder, or below it, take from here what their options leave out.
# Paths begin at this folder. Secrets do not belong here.

# inventory = "inventory.toml"         # the fleet
# selector = "all"                     # devices that bootstrap, deploy, status and doctor work on where none are said
# bundles = "bundles"                  # where bundles are looked for, and written to, that are given by a mere name
# devices = "devices"                  # device profiles of your own
# keys = "~/.config/edgert/keys"       # signing keys; never in this folder

# [broker]                             # where devices report to; watch, fleet, bootstrap and doctor use it
# address = "10.0.0.1:8883"
# tls = true
# ca = "ca.pem"                        # the authority that signed its certificate, if not a public one
# username = "edge"
# password_file = "~/.config/edgert/mqtt-password"

# [trial]                              # what must hold while a new version is on trial; else devices roll it back
# watch = "10m"
# error_rate = "0.1%"

# [trial.digits]                       # the same for one model
# p99_ms = 8
"""
FLEET = """\
# The fleet: one table a device. `edgert device add NAME USER@HOST` writes here; comments and order stay.
"""
IGNORED = ("*.edgert", "*.key.pem", ".inventory.toml.lock", "bundles/", "fleet.db*")


@click.command()
@click.argument("folder", default=".", metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path))
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Make DIR (this folder, where none is given) a project: edgert.toml, inventory.toml, .gitignore.

    A signing key is made where you have none, in your own configuration, outside of the project. What is there
    already stays as it is: the command may be given again.

    \b
    Examples:
      edgert init
      edgert init ~/fleet
    """
    try:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        above = find_project(folder.parent)
        files = {FILE_NAME: PROJECT, INVENTORY: FLEET, ".gitignore": "\n".join((*IGNORED, ""))}
        made = [name for name, text in files.items() if _written(folder / name, text)]
        lines = (folder / ".gitignore").read_text(errors="replace").split()
    except OSError as error:
        raise ConfigInvalid(f"cannot make {folder} a project: {error.filename}: {error.strerror}") from error
    project = find_project(folder)  # also says what is wrong with a file that was there
    assert project is not None
    private, public = key_paths(project.keys or keys_dir(), "default")
    if not private.exists() and not public.exists():
        write_key_pair(new_key(), private, public)
        made.append(str(private))
    stayed = [name for name in files if name not in made]
    text = f"{folder} is a project; made: {', '.join(made) or 'nothing, all was there'}"
    emit({"project": str(folder), "made": made, "stayed": stayed, "key": str(public)}, text, as_json)
    if above is not None:
        click.echo(
            f"note: {folder} lies in the project {above.root}; here, its own {FILE_NAME} is the one that counts",
            err=True,
        )
    users = config_folder() / INVENTORY
    if INVENTORY in made and users.exists():
        click.echo(f"note: your devices so far stand in {users}: copy it here, or give --inventory", err=True)
    if lacking := [line for line in IGNORED if line not in lines]:
        click.echo(f"note: .gitignore was there; it lacks {', '.join(lacking)}", err=True)
    click.echo(f"signing key: {private} (keep it, and back it up: devices trust only what it signs)", err=True)
    click.echo("next: edgert device add NAME USER@HOST, then edgert doctor", err=True)


def _written(path: Path, text: str) -> bool:
    """Write what is not there yet; whether it was not."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:  # an empty file would look like one that was there
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return True
