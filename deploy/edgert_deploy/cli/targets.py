"""`edgert targets`: what a bundle can be built for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgert_deploy.cli.fleet_options import columns, emit, json_option
from edgert_deploy.devices.profiles import list_profiles


@click.command()
@click.option(
    "--devices", "devices_dir", type=click.Path(path_type=Path), help="Folder with device profiles of your own."
)
@json_option
def targets(devices_dir: Path | None, as_json: bool) -> None:
    """List the targets of `edgert build --target`: the device profiles, each one TOML file.

    The engine is the first of the profile's ladder, which is the one that is built for. Where ./devices is a
    folder with profiles, these are listed in place of those that ship.

    \b
    Examples:
      edgert targets
      edgert targets --devices ./my-boards --json
    """
    profiles = list_profiles(devices_dir)
    rows = [("TARGET", "ENGINE", "PRECISION", "MACHINES", "PYTHON", "DESCRIPTION")]
    rows += [
        (p.name, p.engines[0], p.precision, ", ".join(p.machines) or "any", p.python, p.description) for p in profiles
    ]
    emit({"targets": [asdict(profile) for profile in profiles]}, columns(rows), as_json)
