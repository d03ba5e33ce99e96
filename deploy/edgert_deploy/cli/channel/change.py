"""`edgert channel halt`, `resume`, `renew` and `remove`: sign the next statement of a channel."""

from __future__ import annotations

from collections.abc import Callable

import click

from edgert.cli.output import emit, json_option
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.channel_options import (
    RegistryOptions,
    SigningOptions,
    channels_of,
    registry_options,
    signing_options,
    statement_table,
)
from edgert_deploy.cli.shared.types import ChannelName, ModelName
from edgert_deploy.rollout.channel_entries import Entries, with_halt, without_model


@click.command()
@click.argument("name", type=ChannelName())
@click.argument("model", required=False, default="", type=ModelName())
@registry_options
@signing_options
@json_option
def halt(name: str, model: str, registry: RegistryOptions, signing: SigningOptions, as_json: bool) -> None:
    """Halt the newest release of MODEL (default: of every model) in channel NAME.

    No further device starts to install the release. Devices that have the release keep it: to replace it on these
    devices, publish a fixed release.

    \b
    Example:
      edgert channel halt canary digits
    """
    _change(name, lambda entries: with_halt(entries, model, True), registry, signing, as_json)


@click.command()
@click.argument("name", type=ChannelName())
@click.argument("model", required=False, default="", type=ModelName())
@click.option("--retry", is_flag=True, help="Let devices that rolled the release back or refused it try it once more.")
@registry_options
@signing_options
@json_option
def resume(
    name: str, model: str, retry: bool, registry: RegistryOptions, signing: SigningOptions, as_json: bool
) -> None:
    """Offer the halted release of MODEL (default: of every model) in channel NAME again.

    \b
    Examples:
      edgert channel resume canary digits
      edgert channel resume canary digits --retry
    """
    _change(name, lambda entries: with_halt(entries, model, False, retry=retry), registry, signing, as_json)


@click.command()
@click.argument("name", type=ChannelName())
@click.option(
    "--revoke",
    "revoked",
    multiple=True,
    metavar="KEY",
    help="Revoke this key, by its id: devices no longer trust it. May be repeated.",
)
@registry_options
@signing_options
@json_option
def renew(
    name: str, revoked: tuple[str, ...], registry: RegistryOptions, signing: SigningOptions, as_json: bool
) -> None:
    """Sign channel NAME again without other changes, with a later expiry; revoke keys.

    Run this command before the channel expires, unless another command changes the channel in time. Devices install
    nothing from an expired statement, and raise the alarm channel_stale. A key cannot revoke itself: give another key
    with --key.

    \b
    Examples:
      edgert channel renew stable
      edgert channel renew stable --expires 90d
      edgert channel renew stable --revoke 0123456789abcdef --key ~/keys/second.key.pem
    """
    _change(name, lambda entries: entries, registry, signing, as_json, revoked)


@click.command()
@click.argument("name", type=ChannelName())
@click.argument("model", type=ModelName())
@registry_options
@signing_options
@json_option
def remove(name: str, model: str, registry: RegistryOptions, signing: SigningOptions, as_json: bool) -> None:
    """Take MODEL out of channel NAME. Devices keep the release that they have.

    \b
    Example:
      edgert channel remove stable digits
    """
    _change(name, lambda entries: without_model(entries, model), registry, signing, as_json)


def _change(
    name: str,
    edit: Callable[[Entries], Entries],
    registry: RegistryOptions,
    signing: SigningOptions,
    as_json: bool,
    revoked: tuple[str, ...] = (),
) -> None:
    """Change an existing channel and print its new statement."""
    key = signing.key()
    with registry.opened() as client:
        channels, lasts_s = channels_of(client), signing.lasts_s
        statement = channels.change(name, edit, key, lasts_s=lasts_s, revoked=revoked, creates=False)
    emit({"ok": True, "channel": to_json(statement)}, statement_table(statement), as_json)
