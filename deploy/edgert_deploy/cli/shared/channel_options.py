"""The common code of the registry commands: their options, and the channels that they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from edgert.bundle.channel import Entry, Statement
from edgert.bundle.signing import SigningKey, read_public_key
from edgert.cli.output import progress
from edgert.cli.quantity import Duration
from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.names import RUNTIME
from edgert.registry.client import Registry
from edgert.typed_json import to_json
from edgert.versions.trial_limits import parse_limits
from edgert_deploy.cli.shared.option_groups import gathered, given_option
from edgert_deploy.cli.shared.options import limit_option
from edgert_deploy.cli.shared.output import columns
from edgert_deploy.cli.shared.types import FILE, FILE_NAME, ChannelName, DeviceShare, ProfileName
from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.keys import public_keys, signing_key
from edgert_deploy.common.project import find_project
from edgert_deploy.common.registry import open_registry
from edgert_deploy.common.trial_limits import limits_for
from edgert_deploy.rollout.channel_entries import with_release
from edgert_deploy.rollout.channels import EXPIRES_S, Channels, SeenCounters
from edgert_deploy.rollout.publish import Release

F = TypeVar("F", bound=Callable[..., Any])

# Parameters that have a meaning only with a channel.
_OF_OFFER = ("share", "sites", "tags", "limits", "watch_s", "lasts_s")
_YEARS_S = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class RegistryOptions:
    """The registry: its address, the file of its CA, and the login file."""

    address: str | None
    ca: Path | None
    login: Path | None

    def opened(self) -> closing[Registry]:
        """Return the registry, which the `with` block closes. Raises ConfigInvalid."""
        return closing(open_registry(self.address or "", self.ca, self.login))


@dataclass(frozen=True)
class SigningOptions:
    """The key that signs a statement, and the time for which the statement is valid."""

    key_given: str | None
    lasts_s: float

    def key(self) -> SigningKey:
        """Return the key that signs the statement. Raises ConfigInvalid."""
        return signing_key(self.key_given)


@dataclass(frozen=True)
class OfferOptions:
    """The devices that a release is for, and the settings of its trial."""

    share: float
    sites: tuple[str, ...]
    profiles: tuple[str, ...]
    tags: tuple[str, ...]
    watch_s: float | None
    limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, names in (("--site", self.sites), ("--profile", self.profiles), ("--tag", self.tags)):
            if not all(name.strip() for name in names):
                raise ConfigInvalid(f"{option} is empty and would select no device: give a value, or omit it")

    def devices(self) -> dict[str, Any]:
        """Return the fields of an entry that select devices."""
        return {"share": self.share, "sites": self.sites, "profiles": self.profiles, "tags": self.tags}

    def trial(self, model: str) -> dict[str, Any]:
        """Return the fields of an entry that describe the trial, including the project's limits."""
        if model == RUNTIME:
            if self.limits:
                raise ConfigInvalid("a runtime has no trial limits, only a time on trial: give --watch, not --limit")
            return {} if self.watch_s is None else {"watch_s": self.watch_s}
        limits = limits_for(model, find_project().trial, parse_limits(self.limits), self.watch_s)
        return {} if limits is None else {"limits": limits.bounds, "watch_s": limits.watch_s}

    def changed_trial(self, model: str) -> dict[str, Any]:
        """Return the fields of the trial to change in an entry. --watch alone keeps the limits."""
        if not self.limits and self.watch_s is None:
            return {}
        trial = self.trial(model)
        return trial if self.limits else {"watch_s": trial["watch_s"]}


# The options of the registry, which the command receives as `registry`.
registry_options = gathered(
    "registry",
    RegistryOptions,
    click.option(
        "--registry",
        "address",
        metavar="oci://HOST/REPOSITORY",
        help="The registry [default: the project's, [registry] in edgert.toml].",
    ),
    click.option("--registry-ca", "ca", type=FILE, help="CA certificate for the registry [default: the system's CAs]."),
    click.option(
        "--registry-login",
        "login",
        type=FILE,
        help="The login file [default: config.json in $DOCKER_CONFIG or ~/.docker, as docker login writes it].",
    ),
)

# The command receives these options as `signing`.
signing_options = gathered(
    "signing",
    SigningOptions,
    click.option(
        "--key",
        "key_given",
        type=FILE_NAME,
        metavar="NAME|FILE",
        help="Key to sign with: a name (edgert keys list), or the file of a private key [default: default].",
    ),
    click.option(
        "--expires",
        "lasts_s",
        type=Duration(60, _YEARS_S),
        default=EXPIRES_S,
        help="Time after which the statement expires; devices then install nothing new [default: 30d].",
    ),
)

channel_option = click.option(
    "--channel", type=ChannelName(), help="Offer the release to the devices that follow this channel."
)

_DEVICES = (
    click.option(
        "--share",
        type=DeviceShare(),
        default=1.0,
        help="Offer the release to this share of the devices, such as 5%; a higher share later only adds devices "
        "[default: 100%].",
    ),
    click.option("--site", "sites", multiple=True, metavar="SITE", help="Only devices of this site. May be repeated."),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        type=ProfileName(),
        help="Only devices of this profile. May be repeated.",
    ),
    click.option(
        "--tag",
        "tags",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Only devices with this tag, or with a tag of this key. May be repeated.",
    ),
)


def entry_options(watch_default: str, *, limits: bool = True) -> Callable[[F], F]:
    """Add the options for a release's devices and trial; the command receives them as `chosen`."""
    return gathered(
        "chosen", OfferOptions, *_DEVICES, *((limit_option,) if limits else ()), _watch_option(watch_default)
    )


def _watch_option(default: str) -> Callable[[F], F]:
    return click.option(
        "--watch",
        "watch_s",
        type=Duration(),
        help=f"Time for which a device watches a release before it keeps it [default: {default}].",
    )


def check_offered(channel: str | None, *others: str) -> None:
    """Raise UsageError if an option of an offer, or one of `others`, is given without a channel."""
    if channel is None and (lone := given_option(*_OF_OFFER, *others)):
        raise click.UsageError(f"{lone} needs a channel: give --channel NAME, too")


def channels_of(registry: Registry) -> Channels:
    """Return the registry's channels. The public keys of the project and the user are trusted."""
    trusted = tuple(read_public_key(path) for path in public_keys())
    return Channels(registry, trusted, SeenCounters(config_folder() / "channels.json"))


def offer_release(
    registry: Registry, channel: str, release: Release, how: Mapping[str, Any], key: SigningKey, signing: SigningOptions
) -> tuple[dict[str, Any], str]:
    """Offer a release to a channel's devices. Return the statement as JSON, and a line for people.

    `how` has further fields of the entry, such as `share` and `limits`.
    """
    entry = Entry(release.model, release.number, release.digest, release.envelope, release.oci_manifest, **how)
    channels, lasts_s = channels_of(registry), signing.lasts_s
    warn_of_lower_scores(channels, channel, entry)
    statement = channels.change(channel, lambda entries: with_release(entries, entry), key, lasts_s=lasts_s)
    line = f"channel {channel}, counter {statement.counter}: for {devices_text(entry)}, until {statement.expires}"
    return to_json(statement), line


def warn_of_lower_scores(channels: Channels, channel: str, entry: Entry) -> None:
    """Warn if the release scored less at its build than the release that the channel offers now."""
    if entry.model != RUNTIME:
        for text in channels.lower_scores(channel, entry):
            progress(f"warning: {text}; edgert bundle diff shows the differences")


def statement_table(statement: Statement) -> str:
    rows = [("MODEL", "RELEASE", "DEVICES", "LIMITS", "WATCH", "STATE")]
    for entry in statement.entries:
        limits = ", ".join(f"{name}={value:g}" for name, value in entry.limits.items()) or "-"
        state = "halted" if entry.halted else "open"
        watch = duration_text(entry.watch_s)
        rows.append((entry.model, f"r{entry.release}", devices_text(entry), limits, watch, state))
    over = f" (expired: edgert channel renew {statement.channel})" if statement.expired(time.time()) else ""
    until = f"until {statement.expires}{over}"
    head = f"channel {statement.channel}, counter {statement.counter}, signed {statement.issued}, {until}"
    revoked = f"\nrevoked keys: {', '.join(statement.revoked)}" if statement.revoked else ""
    return f"{head}{revoked}\n{columns(rows) if statement.entries else 'no models'}"


def devices_text(entry: Entry) -> str:
    """Return text for the devices that an entry selects: `5% of site plant-a`."""
    named = (("site", entry.sites), ("profile", entry.profiles), ("tag", entry.tags))
    of = ", ".join(f"{kind} {' or '.join(names)}" for kind, names in named if names)
    share = "all" if entry.share >= 1 else f"{100 * entry.share:g}%"
    return f"{share} of {of}" if of else share
