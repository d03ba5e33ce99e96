"""`edgert publish`: put a bundle into a registry, and into a channel there."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.cli.output import emit, json_option, progress
from edgert_deploy.cli.shared.channel_options import (
    OfferOptions,
    RegistryOptions,
    SigningOptions,
    channel_option,
    check_offered,
    entry_options,
    offer_release,
    registry_options,
    signing_options,
)
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.cli.shared.upload_progress import upload_progress
from edgert_deploy.common.quantities import size_text
from edgert_deploy.rollout.publish import publish as put
from edgert_deploy.rollout.request import read_offer


@click.command()
@click.argument("bundle", type=BundlePath())
@channel_option
@entry_options("the project's, else 60s")
@signing_options
@registry_options
@json_option
def publish(
    bundle: Path,
    channel: str | None,
    chosen: OfferOptions,
    signing: SigningOptions,
    registry: RegistryOptions,
    as_json: bool,
) -> None:
    """Put BUNDLE into a registry, and with --channel offer it to the devices that follow the channel.

    You can use any OCI registry. The command sends only files that the registry lacks. A published release is
    immutable: the command refuses the same number with other content.

    A channel is a statement that you sign. Devices verify the statement and fetch the release. They put the release on
    trial with its limits, and keep it or roll it back by themselves. See docs/channels.md.

    The command uses the login of docker, podman or skopeo (docker login HOST).

    \b
    Examples:
      edgert publish digits.edgert --registry oci://registry.example.org/plant/models
      edgert publish digits.edgert --channel canary --share 5%
      edgert publish digits.edgert --channel canary --limit p99_ms=8 --watch 10m
      edgert publish digits.edgert --channel stable --site plant-a --tag line=3
    """
    check_offered(channel, "profiles")
    offer = read_offer(bundle)  # verify the bundle before any connection
    trial = chosen.trial(offer.manifest.model)
    key = signing.key() if channel else None
    with registry.opened() as client:
        with upload_progress(str(client.repository)) as on_bytes:
            release = put(client, bundle, on_bytes, progress)
        sent = f"sent {size_text(release.sent_bytes)} of {size_text(release.size_bytes)}"
        text = f"{release.tag} in {client.repository}: {sent if release.sent_bytes else 'the registry had its files'}"
        value = {"ok": True, "release": release.as_json()}
        if channel and key is not None:
            value["channel"], line = offer_release(client, channel, release, chosen.devices() | trial, key, signing)
            text += f"\n{line}"
    emit(value, text, as_json)
