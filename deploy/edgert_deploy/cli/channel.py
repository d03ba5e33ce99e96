"""`edgert channel`: show a channel of a registry, halt and resume its releases, renew it."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from edgert.telemetry.messages import hint_topic
from edgert.telemetry.mqtt import MqttSettings
from edgert.telemetry.retained import retain
from edgert_deploy.cli.broker_options import broker_alone_options
from edgert_deploy.cli.channel_options import (
    Reach,
    Signing,
    channels_of,
    reach_options,
    signing_options,
    statement_json,
    statement_table,
)
from edgert_deploy.cli.channel_watch import progress_json, progress_table, read_progress, watch
from edgert_deploy.cli.options import json_option, store_option
from edgert_deploy.cli.output import emit
from edgert_deploy.cli.types import ChannelName
from edgert_deploy.rollout.channel_entries import Entries, with_halt, without_model
from edgert_deploy.rollout.channels import Change


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def channel() -> None:
    """Show and watch a channel of a registry, halt and resume its releases, renew it.

    Devices follow a channel with edgertd follow; edgert publish and edgert promote put releases into it. Each change is a
    new statement that you sign, with a counter that only rises.

    \b
    Examples:
      edgert channel show stable
      edgert channel halt canary digits
      edgert channel renew stable --expires 60d
    """


channel.add_command(watch)


@channel.command()
@click.argument("name", type=ChannelName())
@click.option("--fleet", is_flag=True, help="Show how far each release is, by what devices report to the store.")
@store_option
@reach_options
@json_option
def show(name: str, fleet: bool, store_url: str, reach: Reach, as_json: bool) -> None:
    """Show the statement of channel NAME, its signature verified; with --fleet its progress.

    A device took a release, has it on trial, went back from it or refused it, waits, or is silent: not heard of for 15
    minutes.

    \b
    Examples:
      edgert channel show stable
      edgert channel show stable --fleet --store fleet.db
      edgert channel show stable --registry oci://registry.example.org/plant/models --json
    """
    with reach.opened() as client:
        statement = channels_of(client).read(name)
    value, text = {"ok": True, "channel": statement_json(statement)}, statement_table(statement)
    if fleet:
        found = read_progress(statement, store_url)
        value |= progress_json(found)
        text += f"\n\n{progress_table(found)}"
    emit(value, text, as_json)


@channel.command()
@click.argument("name", type=ChannelName())
@click.argument("model", required=False, default="")
@reach_options
@signing_options
@json_option
def halt(name: str, model: str, reach: Reach, signing: Signing, as_json: bool) -> None:
    """Halt the newest release of MODEL (default: of every model) in channel NAME.

    Devices that have not begun with it do not begin, and keep what they have. Devices that have it keep it, too: to
    replace it there, publish a fixed release.

    \b
    Example:
      edgert channel halt canary digits
    """
    _change(name, lambda entries: with_halt(entries, model, True), reach, signing, as_json)


@channel.command()
@click.argument("name", type=ChannelName())
@click.argument("model", required=False, default="")
@click.option("--retry", is_flag=True, help="Devices that went back from it, or refused it, try it once more.")
@reach_options
@signing_options
@json_option
def resume(name: str, model: str, retry: bool, reach: Reach, signing: Signing, as_json: bool) -> None:
    """Offer the halted release of MODEL (default: of every model) in channel NAME again.

    \b
    Examples:
      edgert channel resume canary digits
      edgert channel resume canary digits --retry
    """
    _change(name, lambda entries: with_halt(entries, model, False, retry=retry), reach, signing, as_json)


@channel.command()
@click.argument("name", type=ChannelName())
@click.option(
    "--revoke",
    "revoked",
    multiple=True,
    metavar="KEY",
    help="Devices no longer trust this key, by its id. May be repeated.",
)
@reach_options
@signing_options
@json_option
def renew(name: str, revoked: tuple[str, ...], reach: Reach, signing: Signing, as_json: bool) -> None:
    """Sign channel NAME again as it is, with a later expiry; revoke keys.

    A channel that nobody changes needs this before it expires: devices raise the alarm channel_stale and take nothing
    from a statement that expired. A revoked key cannot sign the statement that revokes it: pass --key of another one.

    \b
    Examples:
      edgert channel renew stable
      edgert channel renew stable --expires 90d
      edgert channel renew stable --revoke 0123456789abcdef --key ~/keys/second.key.pem
    """
    _change(name, lambda entries: entries, reach, signing, as_json, revoked)


@channel.command()
@click.argument("name", type=ChannelName())
@broker_alone_options
@json_option
def hint(name: str, settings: MqttSettings, as_json: bool) -> None:
    """Have the devices that follow channel NAME ask the registry at once, not only at their interval.

    The broker retains a message without content for them. It carries no authority: a device verifies the statement in the
    same way. All of them ask within seconds, so a large fleet does without.

    \b
    Examples:
      edgert channel hint stable
      edgert channel hint stable --broker broker.example:8883 --tls --username ops --password-file pw
    """
    retain(settings, {hint_topic(name): str(time.time_ns()).encode()})
    emit({"ok": True, "channel": name}, f"hinted: the devices of channel {name} at {settings.address} ask now", as_json)


@channel.command()
@click.argument("name", type=ChannelName())
@click.argument("model")
@reach_options
@signing_options
@json_option
def remove(name: str, model: str, reach: Reach, signing: Signing, as_json: bool) -> None:
    """Take MODEL out of channel NAME. Devices keep the release that they have.

    \b
    Example:
      edgert channel remove stable digits
    """
    _change(name, lambda entries: without_model(entries, model), reach, signing, as_json)


def _change(
    name: str,
    edit: Callable[[Entries], Entries],
    reach: Reach,
    signing: Signing,
    as_json: bool,
    revoked: tuple[str, ...] = (),
) -> None:
    """Change a channel that is there, and print its next statement."""
    key = signing.key()
    with reach.opened() as client:
        channels = channels_of(client)
        channels.read(name)  # else a new, empty one would begin
        statement = channels.change(name, edit, key, Change(signing.lasts_s, revoked))
    emit({"ok": True, "channel": statement_json(statement)}, statement_table(statement), as_json)
