"""`edgert channel`: the channels of a registry."""

from __future__ import annotations

import click

from edgert.cli.command import LazyGroup

COMMANDS = {
    "show": ("edgert_deploy.cli.channel.show:show", "Show a channel's statement; --fleet adds the channel's progress."),
    "watch": (
        "edgert_deploy.cli.channel.watch:watch",
        "Watch a release, and halt it if too many devices roll it back.",
    ),
    "halt": ("edgert_deploy.cli.channel.change:halt", "Halt the newest release of a model."),
    "resume": ("edgert_deploy.cli.channel.change:resume", "Offer the halted release of a model again."),
    "renew": ("edgert_deploy.cli.channel.change:renew", "Sign a channel again with a later expiry; revoke keys."),
    "remove": ("edgert_deploy.cli.channel.change:remove", "Take a model out of a channel."),
    "hint": ("edgert_deploy.cli.channel.hint:hint", "Make the devices of a channel check the registry at once."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
def channel() -> None:
    """Show and watch a channel of a registry, halt and resume its releases, renew it.

    Devices follow a channel with edgertd follow; edgert publish and edgert promote put releases into it. Each change is
    a new statement that you sign. The counter of the statements only rises.

    \b
    Examples:
      edgert channel show stable
      edgert channel halt canary digits
      edgert channel renew stable --expires 60d
    """
