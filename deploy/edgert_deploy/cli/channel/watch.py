"""`edgert channel watch`: follow a release, and halt it if too many devices roll it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import click

from edgert.bundle.channel import Statement
from edgert.bundle.signing import SigningKey
from edgert.cli.output import emit, json_option, progress
from edgert.cli.quantity import Duration
from edgert.errors import ConfigInvalid, Interrupted, RolledBack
from edgert.telemetry.messages import wall_ms
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.channel_options import (
    RegistryOptions,
    SigningOptions,
    channels_of,
    devices_text,
    registry_options,
    signing_options,
)
from edgert_deploy.cli.shared.options import for_option, store_option
from edgert_deploy.cli.shared.output import columns, errors_by_cause
from edgert_deploy.cli.shared.stopping import stopping
from edgert_deploy.cli.shared.types import ChannelName, ModelName
from edgert_deploy.fleet.channels import EVENTS_MS, Progress, ReleaseState, progress_of
from edgert_deploy.rollout.channel_entries import newest_of, newest_releases, with_halt
from edgert_deploy.rollout.channels import Channels
from edgert_deploy.rollout.waves import CountOrShare

STOP_S = 0.2


@click.command()
@click.argument("name", type=ChannelName())
@click.argument("model", required=False, default="", type=ModelName())
@click.option(
    "--max-failures",
    default="0",
    show_default=True,
    metavar="SHARE",
    help="Halt a release when more devices rolled it back than this number (3), or than this share (5%) of the devices "
    "that tried it.",
)
@click.option(
    "--interval", "interval_s", type=Duration(1), default="30s", show_default=True, help="Time between two checks."
)
@for_option
@store_option
@registry_options
@signing_options
@json_option
def watch(
    name: str,
    model: str,
    max_failures: str,
    interval_s: float,
    for_s: float | None,
    store_url: str,
    registry: RegistryOptions,
    signing: SigningOptions,
    as_json: bool,
) -> None:
    """Show the progress of channel NAME, and halt a release of MODEL that too many devices roll back.

    Without MODEL, the command watches every model. It reads the devices' reports from the store, which `edgert fleet
    record` must fill.

    --max-failures counts the devices that rolled a release back by themselves, or refused it.

    The command ends when each device has kept the release or rolled it back, and at least one device has started it;
    --for ends it earlier. It does not wait for a device that is stale (no report for 15 minutes), if another device has
    started the release.

    The exit code is 9 if the command halted a release, 130 after Ctrl-C without --for, else 0.

    \b
    Examples:
      edgert channel watch canary --max-failures 2%
      edgert channel watch stable digits --max-failures 3 --for 6h --store postgresql://ops@db/fleet
    """
    limit, key, stopped = CountOrShare.parse(max_failures), signing.key(), stopping(for_s)
    with registry.opened() as client:
        watching = _Watching(channels_of(client), name, model, store_url, limit, key, signing.lasts_s)
        while True:
            done = watching.check()
            if done or _pause(interval_s, stopped):
                break
    value = {"ok": not watching.halted, "halted": watching.halted, **progress_json(watching.found)}
    emit(value, progress_table(watching.found), as_json)
    code = RolledBack.exit_code if watching.halted else 0 if done or for_s is not None else Interrupted.exit_code
    click.get_current_context().exit(code)


@dataclass
class _Watching:
    """One run of the command. `found` is the last progress of the releases, `halted` the halted models."""

    channels: Channels
    name: str
    model: str
    store: str
    limit: CountOrShare
    key: SigningKey
    lasts_s: float
    found: list[Progress] = field(default_factory=list)
    halted: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def check(self) -> bool:
        """Check once, and halt releases with too many failures. Return whether no release is left to watch."""
        statement = self.channels.read(self.name)
        if self.model:
            newest_of(statement.entries, self.model, self.name)  # an unknown model is an error
        elif not statement.entries:
            raise ConfigInvalid(f"channel {self.name} has no models: publish a release to it (edgert publish)")
        releases = [
            release for release in read_progress(statement, self.store) if self.model in ("", release.entry.model)
        ]
        self.found = releases
        self._print_changes(releases)
        done = True
        for model, number in newest_releases(tuple(release.entry for release in releases)).items():
            # The release may have several entries, such as one for each site.
            offered = [
                release
                for release in releases
                if (release.entry.model, release.entry.release) == (model, number) and not release.entry.halted
            ]
            failed, begun = sum(len(each.failed) for each in offered), sum(each.begun for each in offered)
            if self.limit.exceeded(failed, begun):
                self._halt(model, number)
            elif offered and not (begun and all(each.done for each in offered)):
                done = False
        return done

    def _halt(self, model: str, number: int) -> None:
        self.channels.change(self.name, lambda entries: with_halt(entries, model, True), self.key, lasts_s=self.lasts_s)
        self.halted.append(model)
        progress(
            f"halted release {number} of {model}: more than {self.limit} of the devices rolled it back. Publish a "
            f"fixed release, or offer this one again with: edgert channel resume {self.name} {model}"
        )

    def _print_changes(self, releases: Sequence[Progress]) -> None:
        """Print a line for each release whose progress changed."""
        lines = [_line(release) for release in releases if not release.entry.halted]
        for line in lines:
            if line not in self.lines:
                progress(line)
        self.lines = lines


def read_progress(statement: Statement, store_url: str) -> list[Progress]:
    """Read the progress of each entry of a statement from the store. Raises ConfigInvalid or StoreFailed."""
    from edgert_deploy.fleet.store.query import FleetQuery  # imported here, because the other commands need no database

    now_ms = wall_ms()
    with closing(FleetQuery(store_url)) as fleet:
        return progress_of(statement, fleet.devices(), fleet.failures(now_ms - EVENTS_MS, now_ms), now_ms)


def progress_json(releases: Sequence[Progress]) -> dict[str, Any]:
    return {
        "releases": [
            {
                **to_json(release.entry),
                **{state.value: count for state, count in release.counts.items()},
                "failed": [{"device": f"{each.site}/{each.device}", "reason": each.reason} for each in release.failed],
            }
            for release in releases
        ]
    }


def progress_table(releases: Sequence[Progress]) -> str:
    """Return the number of devices in each state for each release, and the reasons for rollbacks."""
    rows = [("MODEL", "RELEASE", "DEVICES", *(_words(state).upper() for state in ReleaseState))]
    for release in releases:
        state = ", halted" if release.entry.halted else ""
        counts = [str(count) for count in release.counts.values()]
        rows.append((release.entry.model, f"r{release.entry.release}", devices_text(release.entry) + state, *counts))
    errors = [
        (
            f"{each.site}/{each.device}",
            f"{release.entry.model} r{release.entry.release}",
            each.reason or "no reason reported",
        )
        for release in releases
        for each in release.failed
    ]
    return f"{columns(rows)}\n{errors_by_cause(errors)}".rstrip()


def _words(state: ReleaseState) -> str:
    return state.value.replace("_", " ")


def _line(release: Progress) -> str:
    counts = (
        ", ".join(f"{count} {_words(state)}" for state, count in release.counts.items() if count) or "no device yet"
    )
    return f"release {release.entry.release} of {release.entry.model} ({devices_text(release.entry)}): {counts}"


def _pause(seconds: float, stopped: Callable[[], bool]) -> bool:
    """Wait for `seconds`, or until the user or --for ends the command. Return whether it ends."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not stopped():
        time.sleep(STOP_S)
    return stopped()
