"""`edgertd`: the device's command. Each subcommand has one file, which is imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from edgert import __version__
from edgert.cli.command import LazyGroup, main_with_errors
from edgert.cli.owner import act_as_owner
from edgert.state_dir import StateDir, default_state_dir

# name -> ("module:attribute", the command's line in --help; "" hides a command that only programs call)
COMMANDS = {
    "serve": ("edgert.cli.serve:serve", "Run the daemon in the foreground."),
    "start": ("edgert.cli.start:start", "Run the daemon in the background and restart it when it ends."),
    "stop": ("edgert.cli.stop:stop", "Stop the daemon after it has answered all requests."),
    "install": ("edgert.cli.install:install", "Verify a bundle and store it in the model's spare slot."),
    "activate": ("edgert.cli.activate:activate", "Make the installed version live, on trial."),
    "check": ("edgert.cli.check:check", "Compare the daemon's answers to golden inputs with the signed answers."),
    "self-test": ("edgert.cli.self_test:self_test", "Load the models and check their golden answers without a daemon."),
    "trial": ("edgert.cli.trial:trial", "Show the state of a trial, or wait for its end."),
    "mark-good": ("edgert.cli.mark_good:mark_good", "End the trial and keep the live version."),
    "rollback": ("edgert.cli.rollback:rollback", "Make the previous good version live again."),
    "bench": ("edgert.cli.bench:bench", "Measure artifacts or the live version."),
    "infer": ("edgert.cli.infer:infer", "Send a request to a model."),
    "follow": ("edgert.cli.follow:follow", "Read the device's channel now, and install its releases."),
    "keys": ("edgert.cli.keys:keys", "List the keys whose bundles this device accepts, or remove one."),
    "status": ("edgert.cli.status:status", "Show the device, its engines and its models."),
    "top": ("edgert.cli.top:top", "Show rates, percentiles, batches, stages and caches live."),
    "claim": ("edgert.cli.claim:claim", ""),
    "unclaim": ("edgert.cli.claim:unclaim", ""),
    "list-files": ("edgert.cli.list_files:list_files", ""),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--state",
    # readable=False: apps of other users may enter this folder, and click's own message has no next step
    type=click.Path(file_okay=False, readable=False, path_type=Path),
    help="The folder of configuration, keys and models [default: $EDGERT_STATE, else /var/lib/edgert or ~/.local/state/edgert].",
)
@click.version_option(__version__, prog_name="edgertd")
@click.pass_context
def edgertd(context: click.Context, state: Path | None) -> None:
    """Serve models on this device: install, try, keep or roll back versions.

    \b
    Examples:
      edgertd status
      edgertd infer digits --input seven.npy
      edgertd rollback digits
    """
    os.umask(0o077)  # files of commands and of the daemon are private, unless code sets another mode
    context.obj = StateDir((state or default_state_dir()).absolute())
    act_as_owner(context.obj, of_keys=context.invoked_subcommand == "keys")  # the owner of the keys may be root


def main(argv: Sequence[str] | None = None) -> int:
    return main_with_errors(edgertd, argv)
