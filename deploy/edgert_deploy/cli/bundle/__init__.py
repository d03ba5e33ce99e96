"""`edgert bundle`: the commands that read a bundle."""

from __future__ import annotations

import click

from edgert.cli.command import LazyGroup

COMMANDS = {
    "inspect": ("edgert_deploy.cli.bundle.inspect:inspect", "Show what a bundle contains."),
    "diff": ("edgert_deploy.cli.bundle.diff:diff", "Show the changes between two bundles."),
    "verify": ("edgert_deploy.cli.bundle.verify:verify", "Check a bundle's signature and every byte."),
    "report": ("edgert_deploy.cli.bundle.report:report", "Write a report on a bundle as one HTML page with plots."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
def bundle() -> None:
    """Inspect, compare, verify and report on bundles.

    \b
    Examples:
      edgert bundle inspect digits.edgert
      edgert bundle diff digits-1.edgert digits-2.edgert
    """
