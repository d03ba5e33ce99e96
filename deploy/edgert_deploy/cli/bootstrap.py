"""`edgert bootstrap`: software, keys, configuration and service on bare devices."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.signing import PublicKey, read_public_key
from edgert_deploy.bootstrap import Bootstrapped, Broker, Wishes, broker_doubt, check_settings
from edgert_deploy.bootstrap import bootstrap as set_up
from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option, say
from edgert_deploy.cli.keys import key_paths, keys_dir
from edgert_deploy.inventory import Device, find_inventory
from edgert_deploy.profiles import load_profile
from edgert_deploy.transports import open_transport


@click.command()
@click.argument("selector")
@click.option(
    "--key",
    "key_names",
    multiple=True,
    help="Key to trust: a name (edgert keys list) or a PEM file [default: default].",
)
@click.option("--engine", default="", help="Install this engine instead of the first of the device's profile.")
@click.option("--broker", metavar="HOST[:PORT]", help="Where the devices report over MQTT.")
@click.option("--mqtt-username", default="", help="User at the broker.")
@click.option(
    "--mqtt-password-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the password, copied."
)
@click.option("--mqtt-ca", type=click.Path(dir_okay=False, path_type=Path), help="Certificate authority: turns TLS on.")
@click.option(
    "--service",
    type=click.Choice(["auto", "systemd", "keeper"]),
    default="auto",
    show_default=True,
    help="What keeps the daemon running: a systemd unit (auto: where systemd runs), or edgertd's own keeper.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="A line of the device's config.toml, such as serving.window_s=10; may be given again.",
)
@click.option("--refresh", is_flag=True, help="Collect the wheels anew.")
@click.option("--devices", "devices_dir", type=click.Path(path_type=Path), help="Folder with device profiles.")
@inventory_option
@json_option
def bootstrap(
    selector: str,
    key_names: tuple[str, ...],
    engine: str,
    broker: str | None,
    mqtt_username: str,
    mqtt_password_file: Path | None,
    mqtt_ca: Path | None,
    service: str,
    settings: tuple[str, ...],
    refresh: bool,
    devices_dir: Path | None,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Make bare devices ready: Python environment, edgert, engine, key, configuration, service.

    SELECTOR is names, groups or `all`, separated by commas. The devices need no internet: all they get comes
    from this host. Done again it changes only what differs.

    \b
    Examples:
      edgert bootstrap kitchen
      edgert bootstrap kitchen --set serving.window_s=10 --set serving.cache_mb=0
      edgert bootstrap all --broker 10.0.0.1:8883 --mqtt-ca ca.pem --mqtt-username edge --mqtt-password-file pw
    """
    devices = find_inventory(inventory_file).select(selector)
    reports_to = Broker.parse(broker, mqtt_username, mqtt_password_file, mqtt_ca) if broker else None
    given = parse_settings(settings)
    check_settings(given)
    keys = trusted_keys(key_names or ("default",))
    if reports_to is not None and (doubt := broker_doubt(reports_to)):
        click.echo(f"warning: {doubt}", err=True)
    wishes = Wishes(keys, reports_to, engine, refresh, service, given)
    rows: list[dict[str, Any]] = []
    failed: EdgeRTError | None = None
    for device in devices:
        try:
            rows.append(asdict(bootstrap_device(device, wishes, devices_dir)))
        except EdgeRTError as error:
            failed = failed or error
            rows.append({"device": device.name, "error": {"code": error.code, "message": error.message}})
            say(device.name, f"failed [{error.code}]")
    if failed is not None and len(devices) == 1:
        raise failed
    homes = {device.name: _python_of(device) for device in devices}
    emit({"ok": failed is None, "devices": rows}, "\n".join(_line(row, homes[row["device"]]) for row in rows), as_json)
    if failed is not None:
        click.get_current_context().exit(failed.exit_code)


def bootstrap_device(device: Device, wishes: Wishes, devices_dir: Path | None = None) -> Bootstrapped:
    """Bootstrap one device over its own link."""
    transport = open_transport(device)
    try:
        profile = load_profile(device.profile, devices_dir)
        return set_up(device, profile, wishes, transport, lambda line: say(device.name, line))
    finally:
        transport.close()


def parse_settings(lines: tuple[str, ...]) -> dict[str, Any]:
    """`SECTION.KEY=VALUE` or `KEY=VALUE`, the value as TOML has it. Raises ConfigInvalid."""
    try:
        return tomlkit.parse("\n".join(lines)).unwrap()
    except TOMLKitError as error:
        raise ConfigInvalid(f"--set takes SECTION.KEY=VALUE as TOML has it (text in quotes): {error}") from error


def trusted_keys(names: tuple[str, ...]) -> tuple[PublicKey, ...]:
    """The public halves of keys given by name or by file. Raises ConfigInvalid."""
    return tuple(read_public_key(_key_path(name)) for name in names)


def _key_path(name: str) -> Path:
    given = Path(name)
    if given.suffix == ".pem" or given.parent != Path():
        return given
    path = key_paths(keys_dir(), name)[1]
    if not path.exists():
        raise ConfigInvalid(f"there is no key {name!r} in {keys_dir()}: make one with: edgert keys new --name {name}")
    return path


def _python_of(device: Device) -> str:
    """The interpreter whose environment has `edgert` there."""
    return sys.executable if device.transport == "local" else f"{device.home}/venv/bin/python"


def _line(row: dict[str, Any], python: str) -> str:
    if "error" in row:
        return f"{row['device']}: failed [{row['error']['code']}]: {row['error']['message']}"
    changed = ", ".join(row["changed"]) or "nothing, all was there"
    engines = ", ".join(f"{name} {version}" for name, version in row["status"]["engines"].items() if version)
    return (
        f"{row['device']}: ready, kept running by {row['service']}; engines {engines}; changed: {changed}\n"
        f"  apps there: {python}, socket {row['status']['socket']}"
    )
