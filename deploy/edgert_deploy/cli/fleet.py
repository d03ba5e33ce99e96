"""`edgert fleet`: what the fleet's reports are recorded, shown, asked and exported with."""

from __future__ import annotations

import click

from edgert.cli.command import LazyGroup

COMMANDS = {
    "record": ("edgert_deploy.cli.fleet_record:record", "Write the fleet's reports to a store, each once."),
    "query": ("edgert_deploy.cli.fleet_query:query", "Ask the store for true percentiles, grouped as you like."),
    "ui": ("edgert_deploy.cli.fleet_ui:ui", "Show the fleet as a web page on this machine, live."),
    "export": ("edgert_deploy.cli.fleet_export:export", "Hand the fleet's reports to Prometheus and OpenTelemetry."),
}


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    extra="fleet",
    help="Record, show, ask and export what the fleet reports over MQTT.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def fleet() -> None:
    return None
