"""`edgert fleet`: watch, record, query, show, export and forget the fleet's reports."""

from __future__ import annotations

import click

from edgert.cli.command import LazyGroup

COMMANDS = {
    "watch": ("edgert_deploy.cli.fleet.watch:watch", "Show the fleet's latency in the terminal, live."),
    "ui": ("edgert_deploy.cli.fleet.ui:ui", "Show the fleet as a web page on this machine, live."),
    "record": ("edgert_deploy.cli.fleet.record:record", "Write the fleet's reports to a store, each report once."),
    "query": ("edgert_deploy.cli.fleet.query:query", "Show true percentiles from the store, grouped as you like."),
    "export": ("edgert_deploy.cli.fleet.export:export", "Export the fleet's reports to Prometheus and OpenTelemetry."),
    "forget": ("edgert_deploy.cli.fleet.forget:forget", "Forget a device: at the broker, and in a store."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS, extra="fleet", context_settings={"max_content_width": 110})
def fleet() -> None:
    """Watch, record, query, show and export the fleet's reports over MQTT.

    \b
    Examples:
      edgert fleet watch --broker broker.local
      edgert fleet record --broker broker.local --store fleet.db
      edgert fleet query --store fleet.db --model digits
    """
