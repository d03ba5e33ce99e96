"""`edgertd`: the device's command. One file a subcommand, found lazily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edgert import __version__
from edgert.cli.command import LazyGroup, main_with_errors
from edgert.cli.owner import act_as_owner
from edgert.config import StateDir, default_state_dir

# name -> ("module:attribute", the line that --help shows)
COMMANDS = {
    "serve": ("edgert.cli.serve:serve", "Run the daemon in the foreground."),
    "start": ("edgert.cli.start:start", "Run the daemon in the background and keep it running."),
    "stop": ("edgert.cli.stop:stop", "Stop the daemon; every request that arrived is answered."),
    "have": ("edgert.cli.have:have", "Say which files of a model lie here already."),
    "install": ("edgert.cli.install:install", "Verify a bundle and put it into the model's spare slot."),
    "activate": ("edgert.cli.activate:activate", "Make the installed version live, on trial."),
    "check": ("edgert.cli.check:check", "Ask the daemon for the golden inputs and compare its answers."),
    "self-test": (
        "edgert.cli.self_test:self_test",
        "Load the models and compare their golden answers, without a daemon.",
    ),
    "trial": ("edgert.cli.trial:trial", "Say how a trial stands, and wait for what becomes of it."),
    "mark-good": ("edgert.cli.mark_good:mark_good", "End the trial: keep the live version."),
    "rollback": ("edgert.cli.rollback:rollback", "Go back to the good version before."),
    "claim": ("edgert.cli.claim:claim", "Keep other deployments of a model away while one is under way."),
    "release": ("edgert.cli.claim:release", "Release a claim."),
    "bench": ("edgert.cli.bench:bench", "Measure artifacts that lie in a folder, engine alone."),
    "infer": ("edgert.cli.infer:infer", "Ask the daemon for an answer."),
    "keys": ("edgert.cli.keys:keys", "List the keys whose bundles this device takes, or trust one no more."),
    "status": ("edgert.cli.status:status", "Show the device, its engines and what its models do."),
    "top": ("edgert.cli.top:top", "Watch the models live: rates, percentiles, batches, stages, caches."),
}


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    help="Serve models on this device: install, try, keep or roll back versions; answer apps on a local socket.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with configuration, keys and models [default: $EDGERT_STATE, else /var/lib/edgert or ~/.local/state/edgert].",
)
@click.version_option(__version__, prog_name="edgertd")
@click.pass_context
def edgertd(context: click.Context, state: Path | None) -> None:
    context.obj = StateDir((state or default_state_dir()).absolute())
    act_as_owner(context.obj)


def main(argv: Sequence[str] | None = None) -> int:
    return main_with_errors(edgertd, argv)
