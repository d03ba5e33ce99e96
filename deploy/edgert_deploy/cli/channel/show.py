"""`edgert channel show`: a channel's statement, and its progress from the devices' reports."""

from __future__ import annotations

import click

from edgert.cli.output import emit, json_option
from edgert.typed_json import to_json
from edgert_deploy.cli.channel.watch import progress_json, progress_table, read_progress
from edgert_deploy.cli.shared.channel_options import RegistryOptions, channels_of, registry_options, statement_table
from edgert_deploy.cli.shared.options import store_option
from edgert_deploy.cli.shared.types import ChannelName


@click.command()
@click.argument("name", type=ChannelName())
@click.option(
    "--fleet", is_flag=True, help="Show the progress of each release, from the devices' reports in the store."
)
@store_option
@registry_options
@json_option
def show(name: str, fleet: bool, store_url: str, registry: RegistryOptions, as_json: bool) -> None:
    """Verify the statement of channel NAME and show it. --fleet adds the progress of the channel.

    The progress counts the devices that kept a release, have the release on trial, rolled it back, refused it, or wait.
    A device is stale if it has neither kept nor rolled back the release, and has sent no report for 15 minutes.

    \b
    Examples:
      edgert channel show stable
      edgert channel show stable --fleet --store fleet.db
      edgert channel show stable --registry oci://registry.example.org/plant/models --json
    """
    with registry.opened() as client:
        statement = channels_of(client).read(name)
    value, text = {"ok": True, "channel": to_json(statement)}, statement_table(statement)
    if fleet:
        progress = read_progress(statement, store_url)
        value |= progress_json(progress)
        text += f"\n\n{progress_table(progress)}"
    emit(value, text, as_json)
