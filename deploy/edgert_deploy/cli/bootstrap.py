"""`edgert bootstrap`: software, keys, configuration and service on bare devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.bundle.signing import PublicKey, read_public_key
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.typed_json import to_json
from edgert_deploy.bootstrap.bootstrap import (
    Bootstrapped,
    BootstrapPlan,
    Wishes,
    go_back,
    plan_bootstrap,
)
from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
from edgert_deploy.bootstrap.runtime import TRIAL_S
from edgert_deploy.bootstrap.wheelhouse import ENGINES_WITHOUT_WHEELS
from edgert_deploy.cli.each import on_each
from edgert_deploy.cli.fleet_options import SelectorWord, emit, inventory_option, json_option, say
from edgert_deploy.cli.own_broker import of_this_broker
from edgert_deploy.common.keys import key_paths, keys_dir
from edgert_deploy.devices.device_files import Broker, broker_doubt, check_settings
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.transports import Transport


@click.command()
@click.argument("selector", type=SelectorWord())
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
    help="Engines to install: all of the profile's ladder that the device can have, its first, or those named.",
)
@click.option("--upgrade", is_flag=True, help="Bring this host's runtime to devices that have another: on trial.")
@click.option("--rollback", is_flag=True, help="Change to the runtime before the one in use: on trial.")
@click.option(
    "--trial-s",
    type=click.FloatRange(10, 86_400),
    default=TRIAL_S,
    show_default=True,
    help="How long a device tries a new runtime before it takes the old one back.",
)
@click.option("--dry-run", is_flag=True, help="Show what is there, what would be sent and done; change nothing.")
@click.option("--broker", metavar="HOST[:PORT]", help="Where the devices report over MQTT.")
@click.option("--mqtt-username", default="", help="User at the broker.")
@click.option(
    "--mqtt-password-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the password, copied."
)
@click.option(
    "--mqtt-tls", is_flag=True, help="TLS to the broker, its certificate checked by the system's authorities."
)
@click.option("--mqtt-ca", type=click.Path(dir_okay=False, path_type=Path), help="Certificate authority: turns TLS on.")
@click.option(
    "--service",
    type=click.Choice(["auto", "systemd", "monitor"]),
    default="auto",
    show_default=True,
    help="What keeps the daemon running: a systemd unit (auto: where systemd runs), or edgertd's own monitor.",
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
    engines: str,
    upgrade: bool,
    rollback: bool,
    trial_s: float,
    dry_run: bool,
    broker: str | None,
    mqtt_username: str,
    mqtt_password_file: Path | None,
    mqtt_tls: bool,
    mqtt_ca: Path | None,
    service: str,
    settings: tuple[str, ...],
    refresh: bool,
    devices_dir: Path | None,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Make bare devices ready: Python environment, edgert, engines, key, configuration, service.

    SELECTOR is as in `edgert device list`. The devices need no internet: all they get comes
    from this host. Done again it changes only what differs; a runtime that serves is left alone without --upgrade.
    An upgrade is tried beside the old one first, then on trial: the device takes the old one back by itself unless the
    new one serves every model that served, with the right answers. Of several, one is upgraded first; where that
    fails, the others are left as they are.

    \b
    Examples:
      edgert bootstrap kitchen --dry-run
      edgert bootstrap kitchen
      edgert bootstrap all --upgrade
      edgert bootstrap kitchen --rollback
      edgert bootstrap kitchen --set serving.window_s=10 --set serving.cache_mb=0
      edgert bootstrap all --broker 10.0.0.1:8883 --mqtt-ca ca.pem --mqtt-username edge --mqtt-password-file pw
    """
    if not any(name.strip() for name in engines.split(",")):
        raise click.UsageError(f"--engines {engines!r} names none: give all, first, or names with commas")
    devices = find_inventory(inventory_file).select(selector)
    reports_to = _reports_to(broker, mqtt_username, mqtt_password_file, mqtt_ca, mqtt_tls) if broker else None
    given = parse_settings(settings)
    check_settings(given)
    keys = trusted_keys(key_names or ("default",))
    if reports_to is not None and (doubt := broker_doubt(reports_to)):
        click.echo(f"warning: {doubt}", err=True)
    if rollback and upgrade:
        raise click.UsageError("give either --upgrade or --rollback")
    wishes = Wishes(keys, reports_to, engines, refresh, service, given, upgrade, trial_s)
    if dry_run:
        _show_plans(devices, wishes, devices_dir, as_json)
        return
    work = _take_back if rollback else partial(_bring, devices_dir=devices_dir)
    answers = on_each(devices, partial(work, wishes), one_first=upgrade or rollback)
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    if errors and len(devices) == 1:
        raise errors[0]
    rows = [_row(device, answer) for device, answer in zip(devices, answers, strict=True)]
    homes = {device.name: device.python for device in devices}
    emit({"ok": not errors, "devices": rows}, "\n".join(_line(row, homes[row["device"]]) for row in rows), as_json)
    if errors:
        click.get_current_context().exit(errors[0].exit_code)


def _reports_to(broker: str, username: str, password_file: Path | None, ca: Path | None, tls: bool) -> Broker:
    given = {"mqtt_username": username, "mqtt_password_file": password_file, "mqtt_ca": ca, "mqtt_tls": tls}
    without = {"mqtt_username": "", "mqtt_password_file": None, "mqtt_ca": None, "mqtt_tls": False}
    said = of_this_broker({"broker": broker, **given}, without, "mqtt_tls")
    return Broker.parse(
        broker, said["mqtt_username"], said["mqtt_password_file"], said["mqtt_ca"], tls=said["mqtt_tls"]
    )


def _bring(wishes: Wishes, device: Device, transport: Transport, devices_dir: Path | None = None) -> Bootstrapped:
    profile = load_profile(device.profile, devices_dir)
    return set_up(device, profile, wishes, transport, partial(say, device.name))


def _take_back(wishes: Wishes, device: Device, transport: Transport) -> Bootstrapped:
    return go_back(device, wishes, transport, partial(say, device.name))


def _plan(wishes: Wishes, device: Device, transport: Transport, devices_dir: Path | None = None) -> BootstrapPlan:
    profile = load_profile(device.profile, devices_dir)
    return plan_bootstrap(device, profile, wishes, transport, partial(say, device.name))


def _row(device: Device, answer: Bootstrapped | EdgeRTError) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return dict(to_json(answer))


def _show_plans(devices: list[Device], wishes: Wishes, devices_dir: Path | None, as_json: bool) -> None:
    """What a bootstrap would do; exits as the first device that cannot be bootstrapped says."""
    answers = on_each(devices, partial(_plan, wishes, devices_dir=devices_dir))
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for device, answer in zip(devices, answers, strict=True):
        if isinstance(answer, EdgeRTError):
            rows.append({"device": device.name, "error": {"code": answer.code, "message": answer.message}})
            lines.append(f"{device.name}: cannot be bootstrapped [{answer.code}]: {answer.message}")
        else:
            rows.append(answer.to_json())
            lines += [f"{device.name}: {step}" for step in answer.steps() or ["nothing to do, all is there"]]
    emit({"ok": not errors, "dry_run": True, "devices": rows}, "\n".join(lines), as_json)
    if errors:
        click.get_current_context().exit(errors[0].exit_code)


def parse_settings(lines: tuple[str, ...]) -> dict[str, Any]:
    """`SECTION.KEY=VALUE` or `KEY=VALUE`, the value as TOML has it. Raises ConfigInvalid."""
    for line in lines:
        try:
            tomlkit.parse(line)
        except TOMLKitError as error:
            key, equals, value = line.partition("=")
            hint = f"""; for text: --set '{key}="{value}"'""" if equals and '"' not in value else ""
            raise ConfigInvalid(f"--set {line}: give SECTION.KEY=VALUE, the value as TOML has it{hint}") from error
    try:
        return tomlkit.parse("\n".join(lines)).unwrap()
    except TOMLKitError as error:
        raise ConfigInvalid(f"--set: {error}") from error


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


def _line(row: dict[str, Any], python: str) -> str:
    if "error" in row:
        return f"{row['device']}: failed [{row['error']['code']}]: {row['error']['message']}"
    changed = ", ".join(row["changed"]) or "nothing, all was there"
    engines = ", ".join(
        f"{name} {version}"
        for name, version in row["status"]["engines"].items()
        if version and name not in ENGINES_WITHOUT_WHEELS
    )
    engines += "".join(f"; without {name}" for name in row["lacking"])
    return (
        f"{row['device']}: ready, kept running by {row['service']}; engines {engines}; changed: {changed}\n"
        f"  apps there: {python}, socket {row['status']['socket']}"
    )
