"""`edgert promote`: offer a channel's release to another channel, or to more of its own devices."""

from __future__ import annotations

from dataclasses import replace

import click

from edgert.cli.output import emit, json_option
from edgert.errors import ConfigInvalid
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.channel_options import (
    OfferOptions,
    RegistryOptions,
    SigningOptions,
    channels_of,
    devices_text,
    entry_options,
    registry_options,
    signing_options,
    warn_of_lower_scores,
)
from edgert_deploy.cli.shared.types import ChannelName, ModelName
from edgert_deploy.rollout.channel_entries import newest_of, with_release


@click.command()
@click.argument("model", type=ModelName())
@click.option(
    "--from", "source", type=ChannelName(), help="The channel that has the release [default: the channel of --to]."
)
@click.option("--to", "target", type=ChannelName(), required=True, help="The channel that gets the release.")
@entry_options("as before; with --limit, the project's time, else 60s")
@registry_options
@signing_options
@json_option
def promote(
    model: str,
    source: str | None,
    target: str,
    chosen: OfferOptions,
    registry: RegistryOptions,
    signing: SigningOptions,
    as_json: bool,
) -> None:
    """Offer a channel's newest release of MODEL to another channel, or to more of its own devices.

    The registry has the release already, so the command sends no file. The release keeps its limits unless you give
    other limits. Within one channel, the release also keeps its sites, profiles and tags, unless you give one of
    these. A higher --share only adds devices. The command refuses to promote a halted release.

    \b
    Examples:
      edgert promote digits --from canary --to stable
      edgert promote digits --from canary --to stable --share 10%
      edgert promote digits --to stable --share 50%
    """
    key = signing.key()
    with registry.opened() as client:
        channels = channels_of(client)
        name = source or target
        entry = newest_of(channels.read(name).entries, model, name)
        if entry.halted:
            raise ConfigInvalid(
                f"release {entry.release} of {model} is halted in channel {name}: publish a fixed release, or resume it "
                f"first (edgert channel resume {name} {model})"
            )
        trial = chosen.changed_trial(model)
        devices = chosen.devices()
        if name == target and not (chosen.sites or chosen.profiles or chosen.tags):
            devices = {"share": chosen.share}  # more devices of the same sites, profiles and tags
        entry = replace(entry, **devices, **trial)
        warn_of_lower_scores(channels, target, entry)
        statement = channels.change(target, lambda entries: with_release(entries, entry), key, lasts_s=signing.lasts_s)
    text = (
        f"release {entry.release} of {model} is in channel {target} for {devices_text(entry)}: counter "
        f"{statement.counter}, until {statement.expires}"
    )
    emit({"ok": True, "channel": to_json(statement)}, text, as_json)
