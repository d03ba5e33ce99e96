"""`edgertd install`."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option, progress
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim


@click.command()
# readable=False: click's own message would not name the user.
@click.argument("bundle", type=click.Path(dir_okay=False, readable=False, path_type=Path))
@claim_option
@json_option
@click.pass_obj
def install(state: StateDir, bundle: Path, token: str, as_json: bool) -> None:
    """Verify BUNDLE and store this device's part in the model's spare slot; the live version stays live.

    \b
    Examples:
      edgertd install digits.edgert
      edgertd install digits.edgert && edgertd activate digits && edgertd check digits && edgertd mark-good digits
    """
    from edgert.versions.install import install as install_bundle

    with under_claim(state, token):
        done = install_bundle(bundle, state, read_config(state), progress)
    if done.already_live:
        text = f"release {done.release} of {done.model} is already live"
    else:
        text = f"release {done.release} of {done.model} is installed; make it live with: edgertd activate {done.model}"
    emit(vars(done), text, as_json)
