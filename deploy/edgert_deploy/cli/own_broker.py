"""What a project says of its broker goes to that broker alone: never a login to another one that --broker names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from edgert_deploy.common.broker_address import PORT_PLAIN, PORT_TLS, host_and_port


def of_this_broker(options: dict[str, Any], without: Mapping[str, Any], tls: str) -> dict[str, Any]:
    """`options`, less what a project says of its own broker where --broker names another: a login goes to the broker that
    it was given for. Says so on stderr. `without` are those options' values where nobody gives them, `tls` one's name.

    Raises ConfigInvalid where either address is none.
    """
    context = click.get_current_context()
    own, given = context.lookup_default("broker"), options["broker"]
    if not own or not given or given == own:
        return options
    own_port = PORT_TLS if context.lookup_default(tls) else PORT_PLAIN
    if _place(own, own_port) == _place(given, PORT_TLS if options[tls] else PORT_PLAIN):
        return options
    theirs = [name for name in without if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    if theirs:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in theirs)
        click.echo(
            f"note: {given} is not the project's broker ({own}): what edgert.toml says of that one is left out; "
            f"give what this one needs of {words}",
            err=True,
        )
    return {**options, **{name: without[name] for name in theirs}}


def _place(broker: str, default_port: int) -> tuple[str, int]:
    host, port = host_and_port(broker, default_port)
    return host.lower().rstrip("."), port
