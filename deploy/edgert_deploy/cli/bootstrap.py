"""`edgert bootstrap`: install software, keys, configuration and service on bare devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.bundle.signing import PublicKey, read_public_key
from edgert.cli.output import json_option
from edgert.errors import ConfigInvalid
from edgert.telemetry.link import CONNECTED
from edgert.typed_json import to_json
from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
from edgert_deploy.bootstrap.bootstrap import use_previous_runtime
from edgert_deploy.bootstrap.plan import BootstrapOptions, plan_bootstrap
from edgert_deploy.bootstrap.runtime import TRIAL_S
from edgert_deploy.bootstrap.wheelhouse import ENGINES_WITHOUT_WHEELS, EXTRAS_ASKED
from edgert_deploy.cli.shared.broker_options import of_this_broker
from edgert_deploy.cli.shared.each import Row, run_on_each
from edgert_deploy.cli.shared.options import inventory_option, profiles_option, same_machine_option, selector_argument
from edgert_deploy.cli.shared.output import say
from edgert_deploy.cli.shared.types import FILE, ChannelName, Duration, refuse_pipe
from edgert_deploy.common.keys import public_key
from edgert_deploy.common.quantities import duration_text
from edgert_deploy.devices.device_files import Broker, Following, check_settings
from edgert_deploy.devices.inventory import Device, Inventory, refuse_same_machine
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.transports import Transport


@click.command()
@selector_argument()
@click.option(
    "--key",
    "key_names",
    multiple=True,
    help="Key to trust: a name (edgert keys list) or a PEM file [default: default].",
)
@click.option(
    "--engines",
    "--engine",
    "engines",
    default="all",
    show_default=True,
    metavar="all|first|NAME,...",
    help="Engines to install: all that the profile prefers and the device can have, the first of them, or these.",
)
@click.option(
    "--with",
    "extras",
    multiple=True,
    type=click.Choice(EXTRAS_ASKED),
    help="Packages that some models need: text installs tokenizers. A device keeps them.",
)
@click.option("--upgrade", is_flag=True, help="Replace another version of edgert by this host's, on trial.")
@click.option("--previous-runtime", is_flag=True, help="Change back to the previous runtime, on trial.")
@click.option(
    "--trial",
    "trial_s",
    type=Duration(10, 86_400),
    default=duration_text(TRIAL_S),
    show_default=True,
    help="How long a new runtime is on trial before the device restores the old one.",
)
@click.option("--dry-run", is_flag=True, help="Show what is there, what would be sent and done; change nothing.")
@click.option("--broker", metavar="HOST[:PORT]", help="The MQTT broker that the devices report to.")
@click.option("--mqtt-username", default="", help="User at the broker.")
@click.option("--mqtt-password-file", type=FILE, help="File with the password; the devices get a copy.")
@click.option("--mqtt-tls", is_flag=True, help="Use TLS; the system's authorities check the broker's certificate.")
@click.option("--mqtt-ca", type=FILE, help="Authority that signed the broker's certificate; turns TLS on.")
@click.option(
    "--follow", "registry", metavar="oci://HOST/REPOSITORY", help="The registry whose channel devices follow."
)
@click.option(
    "--channel", type=ChannelName(), default="stable", show_default=True, help="The channel in that registry."
)
@click.option("--registry-ca", type=FILE, help="Authority that signed the registry's certificate.")
@click.option("--registry-login", type=FILE, help="Login file for the registry (docker login); the devices get a copy.")
@click.option(
    "--service",
    type=click.Choice(["auto", "systemd", "monitor"]),
    default="auto",
    show_default=True,
    help="The program that restarts the daemon: systemd (auto: if it runs there and the monitor does not), or edgertd's own monitor.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="A line of the device's config.toml, such as serving.window_s=10. May be repeated.",
)
@click.option(
    "--unlocked", is_flag=True, help="Take the newest wheels that fit, not the versions that edgert was tested with."
)
@same_machine_option
@profiles_option
@inventory_option
@json_option
def bootstrap(
    selector: str,
    key_names: tuple[str, ...],
    engines: str,
    extras: tuple[str, ...],
    upgrade: bool,
    previous_runtime: bool,
    trial_s: float,
    dry_run: bool,
    broker: str | None,
    mqtt_username: str,
    mqtt_password_file: Path | None,
    mqtt_tls: bool,
    mqtt_ca: Path | None,
    registry: str | None,
    channel: str,
    registry_ca: Path | None,
    registry_login: Path | None,
    service: str,
    settings: tuple[str, ...],
    unlocked: bool,
    same_machine: bool,
    profiles_dir: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Set up bare devices: Python environment, edgert, engines, key, configuration, service.

    The devices need no internet: everything they get comes from this host. A repeated bootstrap changes only what
    differs. It leaves another version of edgert as it is, unless you give --upgrade.

    An upgrade is first tried beside the old runtime, then on trial: the device restores the old one unless the new
    one serves every model that was served, with the right answers. Of several devices, one is upgraded first; if that
    fails, the others stay as they are. Without SELECTOR, the devices are those of the project's `selector`.

    \b
    Examples:
      edgert bootstrap kitchen --dry-run
      edgert bootstrap kitchen
      edgert bootstrap kitchen --with text
      edgert bootstrap all --upgrade --trial 5m
      edgert bootstrap kitchen --previous-runtime
      edgert bootstrap kitchen --set serving.window_s=10 --set serving.cache_mb=0
      edgert bootstrap all --broker 10.0.0.1:8883 --mqtt-ca ca.pem --mqtt-username edge --mqtt-password-file pw
      edgert bootstrap all --follow oci://registry.example.org/plant/models --channel stable --registry-login login.json
    """
    if not any(name.strip() for name in engines.split(",")):
        raise click.UsageError(f"--engines {engines!r} names none: write all, first, or names with commas")
    if previous_runtime and upgrade:
        raise click.UsageError("--upgrade and --previous-runtime exclude each other: choose one")
    devices = inventory.select(selector)
    if not same_machine:
        refuse_same_machine(devices, inventory.devices())
    reports_to = _reports_to(broker, mqtt_username, mqtt_password_file, mqtt_ca, mqtt_tls) if broker else None
    if registry is None and (registry_ca or registry_login):
        raise click.UsageError(
            "--registry-ca and --registry-login are for a registry: add --follow oci://HOST/REPOSITORY"
        )
    following = Following.parse(registry, channel, registry_ca, registry_login) if registry else None
    given = parse_settings(settings)
    check_settings(given)
    keys = trusted_keys(key_names or ("default",))
    options = BootstrapOptions(keys, reports_to, engines, service, given, upgrade, trial_s, unlocked, following, extras)

    def plan(device: Device, transport: Transport) -> Row:
        profile = load_profile(device.profile, profiles_dir)
        return plan_bootstrap(device, profile, options, transport, partial(say, device.name)).to_json()

    def do(device: Device, transport: Transport) -> Row:
        tell = partial(say, device.name)
        if previous_runtime:
            return dict(to_json(use_previous_runtime(device, options, transport, tell)))
        return dict(to_json(set_up(device, load_profile(device.profile, profiles_dir), options, transport, tell)))

    if dry_run:
        results = run_on_each(devices, plan)
        lines = [f"{row['device']}: {step}" for row in results.good for step in row["steps"] or ["nothing to do"]]
        results.show("\n".join(lines), as_json, dry_run=True)
        return
    results = run_on_each(devices, do, one_first=upgrade or previous_runtime)
    pythons = {device.name: device.python for device in devices}
    lines = [_line(row, pythons[row["device"]]) for row in results.good]
    results.show("\n".join(lines), as_json)


def _reports_to(broker: str, username: str, password_file: Path | None, ca: Path | None, tls: bool) -> Broker:
    given = {"mqtt_username": username, "mqtt_password_file": password_file, "mqtt_ca": ca, "mqtt_tls": tls}
    without = {"mqtt_username": "", "mqtt_password_file": None, "mqtt_ca": None, "mqtt_tls": False}
    ours = of_this_broker({"broker": broker, **given}, without, "mqtt_tls")
    return Broker.parse(
        broker, ours["mqtt_username"], ours["mqtt_password_file"], ours["mqtt_ca"], tls=ours["mqtt_tls"]
    )


def parse_settings(lines: tuple[str, ...]) -> dict[str, Any]:
    """Read `SECTION.KEY=VALUE` or `KEY=VALUE` with a TOML value. Raises ConfigInvalid."""
    for line in lines:
        try:
            tomlkit.parse(line)
        except TOMLKitError as error:
            key, equals, value = line.partition("=")
            hint = f"""; for text: --set '{key}="{value}"'""" if equals and '"' not in value else ""
            raise ConfigInvalid(f"--set {line}: write SECTION.KEY=VALUE with a TOML value{hint}") from error
    try:
        return tomlkit.parse("\n".join(lines)).unwrap()
    except TOMLKitError as error:
        raise ConfigInvalid(f"--set: {error}") from error


def trusted_keys(names: tuple[str, ...]) -> tuple[PublicKey, ...]:
    """Return the public halves of keys given by name or by file. Raises ConfigInvalid."""
    return tuple(read_public_key(_key_path(name)) for name in names)


def _key_path(name: str) -> Path:
    given = Path(name)
    if given.suffix == ".pem" or given.parent != Path():
        refuse_pipe(given)
        return given
    return public_key(name)


def _line(row: dict[str, Any], python: str) -> str:
    changed = ", ".join(row["changed"]) or "nothing, all was there"
    engines = ", ".join(
        f"{name} {version}"
        for name, version in row["status"]["engines"].items()
        if version and name not in ENGINES_WITHOUT_WHEELS
    )
    engines += "".join(f"; without {name}" for name in row["lacking"])
    telemetry = row["status"]["telemetry"]
    ready = "ready"
    if telemetry["broker"] and telemetry["link"]["state"] != CONNECTED:
        reason = telemetry["link"]["text"] or "no connection yet"
        ready = f"set up, but without its broker {telemetry['broker']} ({reason})"
    return (
        f"{row['device']}: {ready}, kept running by {row['service']}; engines {engines}; changed: {changed}\n"
        f"  apps there: {python}, socket {row['status']['socket']}"
    )
