"""`edgertd follow`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from edgert.checks.channel_status import AGAIN
from edgert.cli.output import emit, json_option
from edgert.config import read_config
from edgert.environment import home_of
from edgert.protocol.control import ask
from edgert.state_dir import StateDir


@click.command()
@click.option(
    "--soon", is_flag=True, help="Let the daemon start a round within seconds, and do not wait for the round."
)
@json_option
@click.pass_context
def follow(context: click.Context, soon: bool, as_json: bool) -> None:
    """Read this device's channel from the registry; fetch and install its releases, and start trials.

    The daemon runs this command at the interval of [follow]. The command exits with 75 if a release must wait for a
    trial, for another deployment, or for the hours of [follow]. If root set the device up, only the service may read
    the registry's login: use --soon.

    \b
    Examples:
      edgertd follow && edgertd status
      edgertd follow --soon
    """
    from edgert.follow.follower import ChannelFollower
    from edgert.follow.set_up import check_follows, open_registry, reporter

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so SIGTERM releases the claim
    state: StateDir = context.obj
    config = read_config(state)
    if soon:
        check_follows(config)
        ask(state.control_socket, {"op": "follow"})
        emit({"channel": config.follow.channel}, "the daemon starts a round soon: see edgertd status", as_json)
        return
    home = home_of(Path(sys.prefix))
    done = ChannelFollower(state, config, open_registry(config), reporter(state), home=home).round()
    if done.failure is not None:
        raise done.failure
    texts = [step.text for step in done.steps]
    emit({"channel": config.follow.channel, "steps": texts}, "\n".join(texts) or "the channel has no model", as_json)
    context.exit(AGAIN if any(step.soon for step in done.steps) else 0)
