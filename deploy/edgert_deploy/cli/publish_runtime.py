"""`edgert publish-runtime`: put this host's runtime into a registry, and into a channel there."""

from __future__ import annotations

import re
from pathlib import Path

import click

from edgert.cli.output import emit, json_option, progress
from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.names import RUNTIME
from edgert_deploy.bootstrap.plan import BootstrapOptions
from edgert_deploy.bootstrap.runtime import TRIAL_S
from edgert_deploy.bootstrap.runtime_release import collect_runtime
from edgert_deploy.bootstrap.runtime_release import publish_runtime as put
from edgert_deploy.cli.shared.bootstrap_options import engines_option, extras_option
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
from edgert_deploy.cli.shared.options import profiles_option
from edgert_deploy.cli.shared.upload_progress import upload_progress
from edgert_deploy.common.quantities import size_text
from edgert_deploy.devices.profiles import load_profile


@click.command("publish-runtime")
@click.argument("release", type=click.IntRange(1, 2**53 - 1))
@click.option(
    "--python",
    "pythons",
    multiple=True,
    required=True,
    metavar="VERSION",
    help="The devices' Python, such as 3.11. May be repeated.",
)
@engines_option
@extras_option
@channel_option
@entry_options(duration_text(TRIAL_S), limits=False)
@signing_options
@registry_options
@profiles_option
@json_option
def publish_runtime(
    release: int,
    pythons: tuple[str, ...],
    engines: str,
    extras: tuple[str, ...],
    channel: str | None,
    chosen: OfferOptions,
    signing: SigningOptions,
    registry: RegistryOptions,
    profiles_dir: Path | None,
    as_json: bool,
) -> None:
    """Put the runtime that this host would bootstrap into a registry as RELEASE, for each --profile.

    Give at least one --profile and one --python. With --channel, the command also offers the release to the devices of
    these profiles that follow the channel.

    A device fetches the wheels that it lacks, makes the new runtime beside the old runtime, and tests it. If a model
    does not answer correctly within --watch, the device rolls back by itself. If root installed the runtime, only
    edgert bootstrap --upgrade changes it. The commands promote, channel halt and channel resume treat edgert.runtime
    like a model.

    \b
    Examples:
      edgert publish-runtime 4 --profile raspberry-pi-4 --python 3.11 --channel canary --share 5%
      edgert promote edgert.runtime --from canary --to stable
    """
    check_offered(channel)
    if not chosen.profiles:
        raise click.UsageError("Missing option '--profile': give each profile of the devices")
    trial = {"watch_s": TRIAL_S} | chosen.trial(RUNTIME)
    for python in pythons:
        if not re.fullmatch(r"3\.[0-9]{1,2}", python):
            raise ConfigInvalid(f"Python {python[:20]!r}: give two numbers, such as 3.11")
    profiles = [load_profile(name, profiles_dir) for name in chosen.profiles]
    options = BootstrapOptions((), engines=engines, extras=extras)
    key = signing.key()
    with registry.opened() as client:
        runtime, files = collect_runtime(release, profiles, pythons, options, progress)
        with upload_progress(str(client.repository)) as on_bytes:
            published = put(client, runtime, files, key, on_bytes, progress)
        text = (
            f"{published.tag} in {client.repository}: edgert {runtime.edgert}, sent {size_text(published.sent_bytes)}"
        )
        runtimes = [target.id for target in runtime.targets]
        value = {"ok": True, "release": {**published.as_json(), "edgert": runtime.edgert, "runtimes": runtimes}}
        if channel:
            value["channel"], line = offer_release(client, channel, published, chosen.devices() | trial, key, signing)
            text += f"\n{line}"
    emit(value, text, as_json)
