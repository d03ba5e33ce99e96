"""`edgert profiles`: the kinds of device that a bundle can be built for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgert.cli.output import emit, json_option
from edgert_deploy.cli.shared.options import profiles_option
from edgert_deploy.cli.shared.output import columns
from edgert_deploy.devices.profiles import list_profiles


@click.command()
@profiles_option
@json_option
def profiles(profiles_dir: Path | None, as_json: bool) -> None:
    """List the device profiles for `edgert build --target`. Each profile is one TOML file.

    The column ENGINE has the engine that the profile prefers. The list contains your own profiles, in --profiles and
    ./profiles, and the profiles that ship with edgert. Your own profile replaces a shipped profile of the same name.

    \b
    Examples:
      edgert profiles
      edgert profiles --profiles ./my-boards --json
    """
    listed = list_profiles(profiles_dir)
    rows = [("PROFILE", "ENGINE", "PRECISION", "MACHINES", "PYTHON", "DESCRIPTION")]
    rows += [
        (p.name, p.engines[0], p.precision, ", ".join(p.machines) or "any", p.python, p.description) for p in listed
    ]
    emit({"profiles": [asdict(profile) for profile in listed]}, columns(rows), as_json)
