"""`edgertd follow`."""

from __future__ import annotations

import signal

import click

from edgert.cli.output import emit, json_option
from edgert.config import StateDir, read_config
from edgert.daemon.side_process import AGAIN


@click.command()
@json_option
@click.pass_context
def follow(context: click.Context, as_json: bool) -> None:
    """Ask the registry for this device's channel, and do what it says: fetch, install, begin trials.

    The daemon runs this at the interval of [follow]. It exits with 75 while a trial or another deployment is waited for.

    \b
    Example:
      edgertd follow && edgertd status
    """
    from edgert.follow.events import reporter
    from edgert.follow.follower import ChannelFollower, open_registry

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # releases the claim
    state: StateDir = context.obj
    config = read_config(state)
    done = ChannelFollower(state, config, open_registry(config), reporter(state, config)).round()
    if done.failure is not None:
        raise done.failure
    texts = [step.text for step in done.steps]
    emit({"channel": config.follow.channel, "steps": texts}, "\n".join(texts) or "the channel has no model", as_json)
    context.exit(AGAIN if any(step.soon for step in done.steps) else 0)
