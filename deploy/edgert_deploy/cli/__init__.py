"""`edgert`: the host's command. One file a subcommand, found lazily, so that `--help` imports no engine."""

from __future__ import annotations

from collections.abc import Sequence

import click

from edgert import __version__
from edgert.cli.command import LazyGroup, main_with_errors
from edgert_deploy.common.project import find_project

# name -> ("module:attribute", the line that --help shows)
COMMANDS = {
    "init": ("edgert_deploy.cli.init:init", "Make a folder the project of a fleet."),
    "keys": ("edgert_deploy.cli.keys:keys", "Make, list and revoke the keys that bundles are signed with."),
    "build": ("edgert_deploy.cli.build:build", "Build, check and sign a bundle for one or more targets."),
    "targets": ("edgert_deploy.cli.targets:targets", "List what a bundle can be built for."),
    "bundle": ("edgert_deploy.cli.bundle:bundle", "Inspect, compare, verify and report on bundles."),
    "infer": ("edgert_deploy.cli.infer:infer", "Ask a running daemon for an answer."),
    "watch": ("edgert_deploy.cli.watch:watch", "Show the fleet's latency as it arrives over MQTT."),
    "fleet": ("edgert_deploy.cli.fleet:fleet", "Record, ask and export what the fleet reports."),
    "device": ("edgert_deploy.cli.device:device", "Add, ask, list, change and remove devices."),
    "bootstrap": (
        "edgert_deploy.cli.bootstrap:bootstrap",
        "Install edgert and its engines on bare devices; upgrade them.",
    ),
    "unbootstrap": ("edgert_deploy.cli.unbootstrap:unbootstrap", "Take everything away again that bootstrap made."),
    "deploy": ("edgert_deploy.cli.deploy:deploy", "Ship a bundle to devices and make it live, or put back what was."),
    "rollout": ("edgert_deploy.cli.rollout:rollout", "Show, resume or give up deployments."),
    "status": ("edgert_deploy.cli.status:status", "Show what is live on devices."),
    "bench": ("edgert_deploy.cli.bench:bench", "Measure a model on devices: latency, throughput, memory, temperature."),
    "doctor": ("edgert_deploy.cli.doctor:doctor", "Look at every precondition, and say what mends it."),
    "logs": ("edgert_deploy.cli.logs:logs", "Show the log of a device's daemon."),
    "ssh": ("edgert_deploy.cli.ssh:ssh", "Open a shell on a device, its host key pinned."),
    "rollback": ("edgert_deploy.cli.rollback:rollback", "Make the version before live again."),
}


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    help="Build checked INT8 models for a mixed fleet, ship them over SSH, watch their latency.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="edgert")
@click.pass_context
def edgert(ctx: click.Context) -> None:
    if ctx.invoked_subcommand != "init" and (project := find_project()) is not None:
        ctx.default_map = project.option_defaults()


def main(argv: Sequence[str] | None = None) -> int:
    return main_with_errors(edgert, argv)
