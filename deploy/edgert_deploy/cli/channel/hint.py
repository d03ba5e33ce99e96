"""`edgert channel hint`: make devices check the registry now."""

from __future__ import annotations

import time

import click

from edgert.cli.output import emit, json_option
from edgert.telemetry.messages import hint_topic
from edgert.telemetry.mqtt import MqttSettings
from edgert.telemetry.retained import retain
from edgert_deploy.cli.shared.broker_options import broker_alone_options
from edgert_deploy.cli.shared.types import ChannelName


@click.command()
@click.argument("name", type=ChannelName())
@broker_alone_options
@json_option
def hint(name: str, settings: MqttSettings, as_json: bool) -> None:
    """Make the devices that follow channel NAME check the registry at once, not only at their interval.

    The broker retains a small message, and each device that receives this message checks the registry. The devices
    verify the channel's statement as always. All devices connect within seconds, so do not use this command for a large
    fleet.

    \b
    Examples:
      edgert channel hint stable
      edgert channel hint stable --broker broker.example:8883 --tls --username ops --password-file pw
    """
    retain(settings, {hint_topic(name): str(time.time_ns()).encode()})
    emit(
        {"ok": True, "channel": name},
        f"the devices that follow channel {name} at {settings.address} will check their registry soon",
        as_json,
    )
