"""The options of `edgert bootstrap`: runtime, daemon, broker, channel."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.bundle.signing import PublicKey, read_public_key
from edgert.cli.quantity import Duration
from edgert.durations import TRIAL_S_MAX, duration_text
from edgert.errors import ConfigInvalid
from edgert.registry.address import parse_repository
from edgert.toml_file import refuse_pipe
from edgert_deploy.bootstrap.plan import ALL_ENGINES
from edgert_deploy.bootstrap.runtime import TRIAL_S
from edgert_deploy.bootstrap.wheelhouse import OPTIONAL_EXTRAS
from edgert_deploy.cli.shared.broker_options import of_this_broker
from edgert_deploy.cli.shared.option_groups import gathered, given_option, section
from edgert_deploy.cli.shared.types import FILE, ChannelName
from edgert_deploy.common.keys import is_key_file, public_key
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.device_files import Broker, Following, check_settings

_FORM = "give SECTION.KEY=VALUE with a TOML value"
_SHOWN_CHARS_MAX = 200  # a message shows at most this much of a setting
_LOGIN_DEFAULTS = {"mqtt_username": "", "mqtt_password_file": None, "mqtt_ca": None, "mqtt_tls": False}


@dataclass(frozen=True)
class RuntimeOptions:
    """The Python environment of a device: its packages, and the change to a new or previous environment."""

    engines: str
    extras: tuple[str, ...]
    unlocked: bool
    upgrade: bool
    previous_runtime: bool
    trial_s: float

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or name no engine."""
        if not any(name.strip() for name in self.engines.split(",")):
            raise click.UsageError(f"--engines {self.engines!r} names no engine: give all, first, or names with commas")
        if self.previous_runtime and self.upgrade:
            raise click.UsageError("--upgrade and --previous-runtime exclude each other: choose one")


@dataclass(frozen=True)
class DaemonOptions:
    """The keys that the daemon trusts, its service, and its configuration."""

    key_names: tuple[str, ...]
    service: str
    settings: tuple[str, ...]

    def trusted_keys(self) -> tuple[PublicKey, ...]:
        """Return the keys that the daemon trusts. Raises ConfigInvalid."""
        return trusted_keys(self.key_names or ("default",))

    def checked_settings(self) -> dict[str, Any]:
        """Return the lines of --set as tables. Raises ConfigInvalid."""
        settings = parse_settings(self.settings)
        check_settings(settings)
        return settings


@dataclass(frozen=True)
class ReportOptions:
    """The broker that devices report to."""

    broker: str | None
    mqtt_username: str
    mqtt_password_file: Path | None
    mqtt_tls: bool
    mqtt_ca: Path | None

    def broker_of_devices(self) -> Broker | None:
        """Return the broker; only the project's own broker receives the project's login.

        A login from the command line replaces a device's own login; the project's login does not replace it. Raises
        ConfigInvalid; also UsageError for a login without a broker.
        """
        if self.broker is None:
            if lone := given_option(*_LOGIN_DEFAULTS):
                raise click.UsageError(
                    f"{lone} needs its broker: give --broker HOST[:PORT], with --mqtt-tls or --mqtt-ca if it uses TLS, "
                    "or write it once as [broker] in the project's edgert.toml"
                )
            return None
        login = of_this_broker(vars(self), _LOGIN_DEFAULTS, ("mqtt_tls", "mqtt_ca"))
        return Broker.parse(
            self.broker,
            login["mqtt_username"],
            login["mqtt_password_file"],
            login["mqtt_ca"],
            tls=login["mqtt_tls"],
            for_new=not given_option("mqtt_username", "mqtt_password_file"),
        )


@dataclass(frozen=True)
class ChannelOptions:
    """The channel that devices follow, and the files for its registry."""

    registry: str | None
    channel: str
    registry_ca: Path | None
    registry_login: Path | None

    def following(self) -> Following | None:
        """Return the channel, or None without a registry. The project's CA is for its own registry's host.

        Raises ConfigInvalid; also UsageError for options that need a registry.
        """
        if self.registry is None:
            if lone := given_option("channel", "registry_ca", "registry_login"):
                raise click.UsageError(f"{lone} needs a registry: give --follow oci://HOST/REPOSITORY")
            return None
        ours = find_project().registry
        trusted = bool(ours.ca) and _registry_host(ours.address) == _registry_host(self.registry)
        ca = self.registry_ca or (Path(ours.ca) if trusted else None)
        return Following.parse(self.registry, self.channel, ca, self.registry_login)


def parse_settings(lines: tuple[str, ...]) -> dict[str, Any]:
    """Read `SECTION.KEY=VALUE` or `KEY=VALUE` with a TOML value. Raises ConfigInvalid."""
    for line in lines:
        # If a line had the heading of a table, the settings after the line would become part of that table.
        if not _toml(line) or line.lstrip().startswith("["):
            raise ConfigInvalid(f"--set {line[:_SHOWN_CHARS_MAX]!r}: {_FORM}{_quoted_hint(line)}")
    try:
        return tomlkit.parse("\n".join(lines)).unwrap()
    except TOMLKitError as error:
        raise ConfigInvalid(f"--set: two settings have one key ({error}): give each key once") from error


def _toml(text: str) -> dict[str, Any]:
    """Return the settings of a line; {} if the line has no settings or is not TOML."""
    try:
        return tomlkit.parse(text).unwrap()
    except TOMLKitError:
        return {}


def _quoted_hint(line: str) -> str:
    """Return a hint that shows the line with its value as a quoted text; "" if quotes do not help."""
    key, equals, value = line.partition("=")
    quoted = f"{key}={json.dumps(value.strip(), ensure_ascii=False)}"
    helps = equals and len(line) <= _SHOWN_CHARS_MAX and _toml(quoted)
    return f"; for text: --set {shlex.quote(quoted)}" if helps else ""


def trusted_keys(names: tuple[str, ...]) -> tuple[PublicKey, ...]:
    """Return the public halves of the keys with these names or files. Raises ConfigInvalid."""
    return tuple(read_public_key(_key_path(name)) for name in names)


def _registry_host(address: str) -> str:
    """Return the host in a registry's address; "" if the address is "". Raises ConfigInvalid."""
    return parse_repository(address).host.lower() if address else ""


def _key_path(name: str) -> Path:
    if is_key_file(name):
        refuse_pipe(Path(name))
        return Path(name)
    return public_key(name)


engines_option = click.option(
    "--engines",
    default=ALL_ENGINES,
    show_default=True,
    metavar="all|first|NAME,...",
    help="Engines to install: all engines of the profile that fit the device, only the first, or named engines.",
)

extras_option = click.option(
    "--with",
    "extras",
    multiple=True,
    type=click.Choice(OPTIONAL_EXTRAS),
    help="Packages that some models need: text installs tokenizers. A device keeps them.",
)

key_option = click.option(
    "--key",
    "key_names",
    multiple=True,
    metavar="NAME|FILE",
    help="Key to trust: a name (edgert keys list), or the file of a public key. May be repeated [default: default].",
)

# The command receives these options as `runtime`.
runtime_options = gathered(
    "runtime",
    RuntimeOptions,
    *section(
        "Runtime",
        engines_option,
        extras_option,
        click.option(
            "--unlocked",
            is_flag=True,
            help="Install the newest wheels that fit, not the versions that edgert was tested with.",
        ),
        click.option("--upgrade", is_flag=True, help="Replace another version of edgert by this host's, on trial."),
        click.option("--previous-runtime", is_flag=True, help="Change back to the previous runtime, on trial."),
        click.option(
            "--trial",
            "trial_s",
            type=Duration(10, TRIAL_S_MAX),
            default=duration_text(TRIAL_S),
            show_default=True,
            help="Time on trial after which the device restores the old runtime if the new runtime does not work.",
        ),
    ),
)

# The command receives these options as `daemon`.
daemon_options = gathered(
    "daemon",
    DaemonOptions,
    *section(
        "Keys, service and configuration",
        key_option,
        click.option(
            "--service",
            type=click.Choice(["auto", "systemd", "monitor"]),
            default="auto",
            show_default=True,
            help="The program that restarts the daemon: systemd, or edgertd's own monitor. auto chooses systemd if systemd runs "
            "on the device and the monitor does not.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="A line of the device's config.toml, such as serving.window_s=10. May be repeated.",
        ),
    ),
)

# The command receives these options as `reports`.
report_options = gathered(
    "reports",
    ReportOptions,
    *section(
        "Reports",
        click.option("--broker", metavar="HOST[:PORT]", help="The MQTT broker that the devices report to."),
        click.option("--mqtt-username", default="", metavar="USER", help="User at the broker."),
        click.option("--mqtt-password-file", type=FILE, help="File with the password; the devices get a copy."),
        click.option(
            "--mqtt-tls", is_flag=True, help="Use TLS; a CA of the system must have signed the broker's certificate."
        ),
        click.option("--mqtt-ca", type=FILE, help="CA certificate for the broker; turns TLS on."),
    ),
)

# The command receives these options as `follow`.
channel_options = gathered(
    "follow",
    ChannelOptions,
    *section(
        "Channel",
        click.option(
            "--follow", "registry", metavar="oci://HOST/REPOSITORY", help="The registry whose channel devices follow."
        ),
        click.option(
            "--channel", type=ChannelName(), default="stable", show_default=True, help="The channel in that registry."
        ),
        click.option("--registry-ca", type=FILE, help="CA certificate for the registry."),
        click.option(
            "--registry-login", type=FILE, help="Login file for the registry (docker login); the devices get a copy."
        ),
    ),
)
