"""`edgert`: the host's command. Each subcommand has one file, which is imported when it is called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

import click

from edgert import __version__
from edgert.cli.command import LazyGroup, main_with_errors
from edgert_deploy.common.ending_signals import on_ending_signal
from edgert_deploy.common.project import find_project

# name -> ("module:attribute", the line that --help shows)
COMMANDS = {
    "init": ("edgert_deploy.cli.init:init", "Make a folder the project of a fleet."),
    "keys": ("edgert_deploy.cli.keys:keys", "Make, list and remove the keys that sign bundles."),
    "build": ("edgert_deploy.cli.build:build", "Build, check and sign a bundle for one or more profiles."),
    "profiles": ("edgert_deploy.cli.profiles:profiles", "List the device profiles, the targets of a build."),
    "bundle": ("edgert_deploy.cli.bundle:bundle", "Inspect, compare, verify and report on bundles."),
    "device": ("edgert_deploy.cli.device:device", "Add, probe, list, change and remove devices."),
    "bootstrap": (
        "edgert_deploy.cli.bootstrap:bootstrap",
        "Install edgert and its engines on bare devices; upgrade them.",
    ),
    "uninstall": ("edgert_deploy.cli.uninstall:uninstall", "Remove EdgeRT from devices."),
    "deploy": ("edgert_deploy.cli.deploy:deploy", "Send a bundle to devices and make it live, or roll back."),
    "publish": ("edgert_deploy.cli.publish:publish", "Put a bundle into a registry, and into a channel there."),
    "publish-runtime": (
        "edgert_deploy.cli.publish_runtime:publish_runtime",
        "Put this host's runtime into a registry, and into a channel there.",
    ),
    "promote": (
        "edgert_deploy.cli.promote:promote",
        "Offer a channel's release to another channel, or to more of its own devices.",
    ),
    "channel": ("edgert_deploy.cli.channel:channel", "Show, halt, resume, renew and watch the channels of a registry."),
    "rollout": ("edgert_deploy.cli.rollout:rollout", "Show, resume or abort rollouts."),
    "rollback": ("edgert_deploy.cli.rollback:rollback", "Make the previous version live again."),
    "status": ("edgert_deploy.cli.status:status", "Show the live releases on devices, and their drift."),
    "infer": ("edgert_deploy.cli.infer:infer", "Send one request to a running daemon."),
    "bench": ("edgert_deploy.cli.bench:bench", "Measure a model on devices: latency, throughput, memory, temperature."),
    "doctor": ("edgert_deploy.cli.doctor:doctor", "Find what is missing or wrong, and name the next steps."),
    "logs": ("edgert_deploy.cli.logs:logs", "Show the log of a device's daemon."),
    "ssh": ("edgert_deploy.cli.ssh:ssh", "Open a shell on a device, with its pinned host key."),
    "fleet": ("edgert_deploy.cli.fleet:fleet", "Watch, record, query and export the fleet's reports."),
    "completion": (
        "edgert_deploy.cli.completion:completion",
        "Print the script that completes commands in your shell.",
    ),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgert")
@click.pass_context
def edgert(ctx: click.Context) -> None:
    """Build checked INT8 models for a mixed fleet, deploy them over SSH, watch their latency.

    \b
    Examples:
      edgert build model.toml
      edgert deploy model.edgert kitchen
      edgert status
    """
    if ctx.invoked_subcommand != "init":
        ctx.default_map = find_project().option_defaults()


def main(argv: Sequence[str] | None = None) -> int:
    if "_EDGERT_COMPLETE" in os.environ:  # a shell asks for completions
        importlib.import_module("edgert_deploy.cli.completion")  # its class replaces click's class for bash
    if argv is not None:
        return main_with_errors(edgert, argv)
    # This process runs the command: SIGTERM and SIGHUP end it as Ctrl-C does, so that it cleans up.
    with on_ending_signal(_interrupt):
        return main_with_errors(edgert, argv)


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt
