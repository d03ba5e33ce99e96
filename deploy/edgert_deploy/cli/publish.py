"""`edgert publish`: put a bundle into a registry, and into a channel there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from edgert.bundle.channel import Entry
from edgert_deploy.cli.channel_options import (
    Chosen,
    Reach,
    Signing,
    channels_of,
    devices_text,
    entry_options,
    reach_of_argument,
    signing_options,
    statement_json,
)
from edgert_deploy.cli.options import json_option
from edgert_deploy.cli.output import emit, say
from edgert_deploy.cli.types import BundlePath, ChannelName
from edgert_deploy.common.quantities import size_text
from edgert_deploy.rollout.channel_entries import with_release
from edgert_deploy.rollout.channels import Change
from edgert_deploy.rollout.publish import Release
from edgert_deploy.rollout.publish import publish as put
from edgert_deploy.rollout.request import read_offer


@click.command()
@click.argument("bundle", type=BundlePath())
@click.argument("address", metavar="[REGISTRY]", required=False)
@click.option("--channel", type=ChannelName(), metavar="NAME", help="Offer it to the devices that follow this channel.")
@entry_options
@signing_options
@reach_of_argument
@json_option
def publish(bundle: Path, channel: str | None, chosen: Chosen, signing: Signing, reach: Reach, as_json: bool) -> None:
    """Put BUNDLE into REGISTRY, and with --channel offer it to the devices that follow the channel.

    REGISTRY is oci://HOST/REPOSITORY, in any OCI registry; without it, the project's. Only files that the registry lacks
    are sent. A release there is immutable: one of the same number with other content is refused.

    A channel is a statement that you sign. Devices verify it, fetch the release, try it with the limits, and keep it or
    go back by themselves. See docs/channels.md.

    The login is that of docker, podman or skopeo (docker login HOST).

    \b
    Examples:
      edgert publish digits.edgert oci://registry.example.org/plant/models
      edgert publish digits.edgert --channel canary --share 5%
      edgert publish digits.edgert --channel canary --limit p99_ms=8 --watch 10m
      edgert publish digits.edgert --channel stable --site plant-a --tag line=3
    """
    offer = read_offer(bundle)  # verified before anything is asked
    trial = chosen.trial(offer.manifest.model)
    key = signing.key() if channel else None
    with reach.opened() as client:
        with UploadProgress(str(client.repository)) as progress:
            release = put(client, bundle, progress)
        value, text = _release_json(release), _release_text(release, str(client.repository))
        if channel and key is not None:
            entry = Entry(
                model=release.manifest.model,
                release=release.manifest.release,
                digest=release.digest,
                envelope=release.envelope,
                manifest=release.oci_manifest,
                **chosen.devices(),
                **trial,
            )
            statement = channels_of(client).change(
                channel, lambda entries: with_release(entries, entry), key, Change(signing.lasts_s)
            )
            value["channel"] = statement_json(statement)
            text += f"\nchannel {channel}, counter {statement.counter}: for {devices_text(entry)}, until {statement.expires}"
    emit({"ok": True, **value}, text, as_json)


def _release_json(release: Release) -> dict[str, Any]:
    return {
        "release": {
            "model": release.manifest.model,
            "release": release.manifest.release,
            "digest": release.digest,
            "tag": release.tag,
            "manifest": f"sha256:{release.oci_manifest}",
            "size_bytes": release.size_bytes,
            "sent_bytes": release.sent_bytes,
        }
    }


def _release_text(release: Release, repository: str) -> str:
    sent = f"sent {size_text(release.sent_bytes)} of {size_text(release.size_bytes)}"
    return f"{release.tag} in {repository}: {sent if release.sent_bytes else 'it was there'}"


class UploadProgress:
    """`with UploadProgress(where) as progress: ... progress(sent, total)`: a bar on a terminal, else a line each tenth."""

    def __init__(self, where: str) -> None:
        self._where, self._tenths = where, 0
        console = Console(stderr=True)
        self._bar = _bar(console) if console.is_terminal else None

    def __enter__(self) -> UploadProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("sending", total=None)
        return self

    def __call__(self, sent: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=sent, total=total)
        elif (tenths := 10 * sent // max(total, 1)) > self._tenths:
            self._tenths = tenths
            say("", f"sending to {self._where}: {10 * tenths} % of {size_text(total)}")

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Progress:
    shown = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *shown, console=console, transient=True, redirect_stdout=False)
