"""What every command that listens to a broker shares: its options, and the settings that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from edgert.names import checked_id
from edgert.telemetry.mqtt import PROTOCOLS, MqttSettings, Session
from edgert_deploy.cli.own_broker import of_this_broker
from edgert_deploy.common.broker_address import PORT_PLAIN, PORT_TLS, host_and_port

SESSION_KEPT_S = 86_400
# What [broker] of a project says besides the address, and what each is where nobody says it.
_WITHOUT = {"tls": False, "ca": "", "cert": "", "key": "", "username": "", "password_file": "", "protocol": "auto"}

F = TypeVar("F", bound=Callable[..., Any])


class _BrokerWord(click.types.StringParamType):
    """HOST[:PORT]; where it is missing, the other place to write it is named."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "Or write it once, as `address` below [broker] in a project's edgert.toml (edgert init)."


_OPTIONS = (
    click.option(
        "--broker",
        required=True,
        type=_BrokerWord(),
        metavar="HOST[:PORT]",
        help="The MQTT broker (default port 1883, with TLS 8883).",
    ),
    click.option("--tls", is_flag=True, help="Use TLS; the broker's certificate and name are always checked."),
    click.option(
        "--ca", metavar="FILE", default="", help="Authority that signed the broker's certificate, if not a public one."
    ),
    click.option("--cert", metavar="FILE", default="", help="Client certificate, where the broker asks for one."),
    click.option("--key", metavar="FILE", default="", help="The client certificate's key."),
    click.option("--username", metavar="USER", default="", help="User to log in as."),
    click.option("--password-file", metavar="FILE", default="", help="File whose first line is the password."),
    click.option(
        "--protocol", type=click.Choice(["auto", *PROTOCOLS]), default="auto", help="MQTT version (default: auto)."
    ),
    click.option("--site", metavar="SITE", help="Only this site."),
)


def broker_options(command: F) -> F:
    """--broker and what belongs to it; the command is given `settings` in their place, and `site`."""

    @functools.wraps(command)
    def with_settings(**options: Any) -> Any:
        options = of_this_broker(options, _WITHOUT, "tls")
        broker, tls = options.pop("broker"), options.pop("tls")
        host, port = host_and_port(broker, PORT_TLS if tls else PORT_PLAIN)
        named = {name: options.pop(name) for name in ("ca", "cert", "key", "username", "password_file", "protocol")}
        return command(settings=MqttSettings(host, port, tls, **named), **options)

    wrapped: Any = with_settings
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]  # functools.wraps keeps no signature that changes


def session_option(command: F) -> F:
    """--session NAME; the command is given `session_name`."""
    return click.option(
        "--session",
        "session_name",
        metavar="NAME",
        help="Have the broker keep what comes while this is away, for a day. One process a NAME.",
    )(command)


def named_session(role: str, name: str | None) -> tuple[str, Session | None]:
    """The client id and the session to connect with; neither where `name` is None. Raises ConfigInvalid."""
    if name is None:
        return "", None
    return f"edgert-{role}-{checked_id('session', name)}", Session(SESSION_KEPT_S)
