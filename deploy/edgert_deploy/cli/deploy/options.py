"""The options of `edgert deploy`: the trial, the order of devices, and the transfer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from edgert.cli.quantity import Duration
from edgert.durations import TRIAL_S_MAX
from edgert.versions.trial_limits import TrialLimits, parse_limits
from edgert_deploy.cli.shared.option_groups import gathered, section
from edgert_deploy.cli.shared.options import limit_option
from edgert_deploy.cli.shared.types import BundlePath, DeviceCount, Rate
from edgert_deploy.common.parallel import at_once_here
from edgert_deploy.common.project import find_project
from edgert_deploy.common.trial_limits import limits_for
from edgert_deploy.rollout.waves import PARALLEL_MAX, Strategy

BYTES_PER_S_MIN = 1000.0


@dataclass(frozen=True)
class TrialOptions:
    """The length of a trial, and the limits that the version must not break."""

    trial_s: float
    limits: tuple[str, ...]
    watch_s: float | None
    unattended: bool | None

    def limits_of(self, model: str) -> TrialLimits | None:
        """Return the limits of `model`, including the project's limits. Raises ConfigInvalid."""
        table, limits = find_project().trial, parse_limits(self.limits)
        return limits_for(model, table, limits, self.watch_s, self.unattended, self.trial_s)


@dataclass(frozen=True)
class WaveOptions:
    """The order of the devices, and the limit of failures that stops a rollout."""

    canary: int
    waves: str
    max_failures: str | None
    pause_s: float
    parallel: int | None

    def strategy(self) -> Strategy:
        """Return the order of the rollout. Raises ConfigInvalid."""
        return Strategy.parse(self.canary, self.waves, self.max_failures, self.parallel or at_once_here(), self.pause_s)


@dataclass(frozen=True)
class TransferOptions:
    """The rate of the transfer, and the bundles that devices already have."""

    bytes_per_s: float | None
    delta_from: tuple[Path, ...]


# The command receives these options as `trial`.
trial_options = gathered(
    "trial",
    TrialOptions,
    *section(
        "Trial on the device",
        click.option(
            "--trial",
            "trial_s",
            type=Duration(1, TRIAL_S_MAX),
            default="60s",
            show_default=True,
            help="Time in which this host must mark the version good; otherwise the device rolls back.",
        ),
        limit_option,
        click.option(
            "--watch",
            "watch_s",
            type=Duration(),
            help="Time for which the device watches the limits: 90s, 10m, 2h [default: the project's; else 60s if "
            "there are limits].",
        ),
        click.option(
            "--unattended/--attended",
            default=None,
            help="Let the device mark the version good without this host if the version breaks no limit [default: only this host marks it].",
        ),
    ),
)

# The command receives these options as `order`.
wave_options = gathered(
    "order",
    WaveOptions,
    *section(
        "Order of the devices",
        click.option(
            "--canary",
            type=DeviceCount(0),
            metavar="COUNT",
            default=0,
            help="Deploy to this many devices first; use --wave for shares.",
            show_default=True,
        ),
        click.option(
            "--wave", "waves", default="", metavar="SHARES", help="Then deploy in waves: 10%,50%,100% of the devices."
        ),
        click.option(
            "--max-failures",
            metavar="SHARE",
            help="Stop when more devices failed than this number (3), or than this share (5%) of the started waves "
            "[default: 0 with --canary or --wave, else never].",
        ),
        click.option(
            "--pause", "pause_s", type=Duration(), default="0s", show_default=True, help="Wait between two waves."
        ),
        click.option(
            "--parallel",
            type=click.IntRange(1, PARALLEL_MAX),
            metavar="COUNT",
            help="Devices at a time [default: as many as this host's cores and its limit of open files allow].",
        ),
    ),
)

# The command receives these options as `transfer`.
transfer_options = gathered(
    "transfer",
    TransferOptions,
    *section(
        "Transfer",
        click.option(
            "--bwlimit",
            "bytes_per_s",
            type=Rate(BYTES_PER_S_MIN),
            help="Send each device at most this much: 500KB/s, 2MB/s [default: no limit].",
        ),
        click.option(
            "--delta-from",
            "delta_from",
            type=BundlePath(),
            multiple=True,
            metavar="OLD.edgert",
            help="An older bundle that another host sent to the devices; the command then sends only differences. May be repeated.",
        ),
    ),
)
