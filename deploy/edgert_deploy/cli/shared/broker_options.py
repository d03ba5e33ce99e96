"""The options that name a broker, and the MQTT settings from them.

The project's options for its broker apply to this broker only. If --broker names another broker, EdgeRT never sends the
project's login to this other broker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from edgert.cli.output import progress
from edgert.config import BrokerLogin
from edgert.names import checked_id
from edgert.telemetry.mqtt import PROTOCOLS, MqttSettings
from edgert_deploy.cli.shared.option_groups import each_of, section
from edgert_deploy.cli.shared.types import FILE_NAME
from edgert_deploy.common.addresses import PORT_PLAIN, PORT_TLS, host_and_port

SESSION_KEPT_S = 86_400
# The settings that [broker] of a project may have besides the address, with their defaults.
_LOGIN_DEFAULTS = BrokerLogin().login

F = TypeVar("F", bound=Callable[..., Any])


class _BrokerWord(click.types.StringParamType):
    """HOST[:PORT]. If the value is missing, the error says that edgert.toml may also name the broker."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "Give it, or write it once as `address` below [broker] in the project's edgert.toml (edgert init)."


_OPTIONS = section(
    "Broker",
    click.option(
        "--broker",
        required=True,
        type=_BrokerWord(),
        metavar="HOST[:PORT]",
        help="The MQTT broker [default port: 1883, with TLS 8883].",
    ),
    click.option("--tls", is_flag=True, help="Use TLS; the broker's certificate and name are always checked."),
    click.option(
        "--ca",
        type=FILE_NAME,
        metavar="FILE",
        default="",
        help="CA certificate for the broker, if no public CA signed the broker's certificate.",
    ),
    click.option(
        "--client-cert",
        "cert",
        type=FILE_NAME,
        metavar="FILE",
        default="",
        help="Client certificate, if the broker requires one.",
    ),
    click.option(
        "--client-key", "key", type=FILE_NAME, metavar="FILE", default="", help="The client certificate's key."
    ),
    click.option("--username", metavar="USER", default="", help="User to log in as."),
    click.option(
        "--password-file", type=FILE_NAME, metavar="FILE", default="", help="File whose first line is the password."
    ),
    click.option(
        "--protocol", type=click.Choice(["auto", *PROTOCOLS]), default="auto", help="MQTT version [default: auto]."
    ),
)
_SITE = click.option("--site", metavar="SITE", help="Only this site.")


def broker_options(command: F) -> F:
    """Add --site, and --broker with its options; the command receives `site` and `settings`."""
    return _SITE(broker_alone_options(command))


def broker_alone_options(command: F) -> F:
    """Add --broker and its options. The command receives `settings` instead of these options."""

    @functools.wraps(command)
    def with_settings(**options: Any) -> Any:
        options = of_this_broker(options, _LOGIN_DEFAULTS, ("tls",))
        login = {name: options.pop(name) for name in _LOGIN_DEFAULTS}
        host, port = host_and_port(options.pop("broker"), PORT_TLS if login["tls"] else PORT_PLAIN)
        return command(settings=MqttSettings(host, port, **login), **options)

    wrapped: Any = with_settings  # functools.wraps cannot type a changed signature
    decorated: F = each_of(*_OPTIONS)(wrapped)
    return decorated


session_option = click.option(
    "--session",
    "session_name",
    metavar="NAME",
    help="Let the broker keep messages for a day while this process does not run. Only one process may use a NAME.",
)


def named_session(role: str, name: str | None) -> tuple[str, int | None]:
    """Return a client id and its session's seconds; "" and None without a name. Raises ConfigInvalid."""
    if name is None:
        return "", None
    return f"edgert-{role}-{checked_id('session', name)}", SESSION_KEPT_S


def of_this_broker(options: dict[str, Any], without: Mapping[str, Any], tls: Sequence[str]) -> dict[str, Any]:
    """Return `options` without the project's settings for its broker, if --broker names another broker.

    `without` has the defaults of the options that belong to a broker, and `tls` names the options that turn TLS on. A
    note on stderr names the ignored options. Raises ConfigInvalid for an invalid address.
    """
    context = click.get_current_context()
    of_project, broker = context.lookup_default("broker"), options["broker"]
    if not of_project or not broker or broker == of_project:
        return options
    of_projects = _place(of_project, any(context.lookup_default(name) for name in tls))
    if of_projects == _place(broker, any(options[name] for name in tls)):
        return options
    left_out = [name for name in without if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    if left_out:
        words = ", ".join(param.opts[0] for param in context.command.params if param.name in left_out)
        progress(
            f"note: {broker} is not the project's broker ({of_project}), so the settings of edgert.toml for {of_project} are "
            f"not used; give {words} if {broker} needs them"
        )
    return {**options, **{name: without[name] for name in left_out}}


def _place(broker: str, tls: bool) -> tuple[str, int]:
    host, port = host_and_port(broker, PORT_TLS if tls else PORT_PLAIN)
    return host.lower().rstrip("."), port
