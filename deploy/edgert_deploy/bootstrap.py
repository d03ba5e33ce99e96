"""From a bare device to one that takes deployments: Python environment, configuration, keys, service.

Done twice it changes nothing. Each environment has a folder of its own, named by what is in it, and `venv` points
at the one in use: an interrupted bootstrap leaves the old one working, and a later one goes on where it stopped.

    HOME/venvs/<digest>/   environments (complete where `.complete` lies in it)
    HOME/venv              symbolic link to the one in use
    HOME/wheels/           wheels on their way in; gone once they are installed
    STATE/config.toml      the device's configuration: what the user wrote there besides ours stays
    STATE/keys/<id>.pem    the public keys whose bundles are accepted
"""

from __future__ import annotations

import hashlib
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.config import DeviceConfig, parse_config
from edgert.errors import ConfigInvalid, DeviceError, EngineMissing
from edgert.signing import PublicKey
from edgert_deploy import service, wheelhouse
from edgert_deploy.facts import MachineFacts, describe, misfits, probe
from edgert_deploy.inventory import Device
from edgert_deploy.profiles import DeviceProfile
from edgert_deploy.remote import RemoteDaemon
from edgert_deploy.transports import Transport, sha256_command
from edgert_deploy.wheelhouse import Wheelhouse, WheelTarget

QUICK_S_MAX = 60.0
VENV_S_MAX = 300.0
INSTALL_S_MAX = 1800.0
ENGINE_S_MAX = 180.0  # the first import of an engine on a slow card
BROKER_S_MAX = 3.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Broker:
    """Where the device reports to. Files are the host's; their content is copied to the device."""

    host: str
    port: int = 1883
    username: str = ""
    password_file: Path | None = None
    ca: Path | None = None

    @classmethod
    def parse(cls, text: str, username: str, password_file: Path | None, ca: Path | None) -> Broker:
        """HOST[:PORT]; port 8883 where a certificate authority is given, else 1883. Raises ConfigInvalid."""
        host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        host, port = (host, port) if colon else (text, "8883" if ca else "1883")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigInvalid(f"broker {text!r}: give HOST or HOST:PORT")
        return cls(host.strip("[]"), int(port), username, password_file, ca)


@dataclass(frozen=True)
class Wishes:
    """What a bootstrap is to bring about besides the software. `engine` "" is the profile's first.

    `service` is systemd, keeper (edgertd's own, gone after a reboot), or auto: systemd where it runs.
    `settings` go into the device's config.toml: {"serving": {"window_s": 10.0}}.
    """

    keys: tuple[PublicKey, ...]
    broker: Broker | None = None
    engine: str = ""
    refresh: bool = False
    service: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bootstrapped:
    """What was done: `changed` lists it, empty where all was so already."""

    device: str
    profile: str
    engine: str
    service: str
    changed: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


def bootstrap(
    device: Device, profile: DeviceProfile, wishes: Wishes, transport: Transport, say: Say = lambda _: None
) -> Bootstrapped:
    """Bring `device` to where it takes deployments, and start its daemon.

    Raises DeviceError (with what to install there by hand), ConfigInvalid, EngineMissing, StorageFailed.
    """
    facts = probe(transport, device.name)
    say(describe(facts))
    unit = None if wishes.service == "keeper" else service.unit_for(device, facts)
    if unit is None and wishes.service == "systemd":
        raise DeviceError(f"systemd does not run on {device.name}: leave --service away, or give --service keeper")
    engine = wishes.engine or profile.engines[0]
    done = Bootstrapped(device.name, profile.name, engine, "systemd" if unit else "keeper")
    if device.transport != "local":
        _check_machine(device, profile, facts)
        _install_environment(device, facts, engine, wishes.refresh, transport, say, done)
    config = _configure(device, profile, facts, wishes, unit is not None, transport, done)
    if unit is not None and not unit.user and service.give_to_user(transport, device):
        done.changed.append("user")
    unit = unit and service.unit_for(device, facts, (*profile.engines, engine), config)
    if unit is not None:
        if _put(transport, unit.path, unit.text.encode()):
            done.changed.append("unit")
        service.enable(transport, device, unit)  # also where a bootstrap before was cut short behind the file
    if any(not change.startswith("key ") for change in done.changed):  # keys are read at each install
        say("starting the daemon")
        service.restart(transport, device, unit)
    elif not RemoteDaemon(transport, device).facts().daemon_running:
        say("the daemon did not run: starting it")
        service.start(transport, device)
        done.changed.append("daemon started")
    done.status = RemoteDaemon(transport, device).status()
    if done.status["engines"].get(engine) is None:
        raise EngineMissing(
            f"{device.name} runs, but engine {engine} does not load there: see `edgertd status` on it"
            + ("; TensorRT comes with JetPack: apt-get install tensorrt" if engine == "tensorrt" else "")
        )
    if device.transport != "local":
        _remove_old_environments(device, transport)
    return done


def _check_machine(device: Device, profile: DeviceProfile, facts: MachineFacts) -> None:
    if not facts.python_path:
        raise DeviceError(
            f"{device.name} has no Python from 3.10 up: install one there (apt-get install python3 python3-venv)"
        )
    reasons = [reason for reason in misfits(profile, facts) if "memory" not in reason]
    if reasons:
        raise DeviceError(
            f"profile {profile.name} {', '.join(reasons)}; {device.name} is {describe(facts)}: "
            "give the device a profile that fits it (edgert device remove, edgert device add --profile)"
        )


def _install_environment(
    device: Device, facts: MachineFacts, engine: str, refresh: bool, transport: Transport, say: Say, done: Bootstrapped
) -> None:
    target = WheelTarget(facts.python, facts.machine, facts.glibc)
    house = wheelhouse.prepare(target, engine, say, refresh=refresh)
    venv = f"{device.home}/venvs/{house.digest[:16]}"
    # TensorRT is the one engine that pip does not bring: JetPack put it where the system's Python looks.
    system_site = engine == "tensorrt"
    is_there = 'test -e "$1/.complete" && test "$(readlink "$2")" = "$1" && test -x "$1/bin/edgertd"'
    if transport.run(["sh", "-c", is_there, "sh", venv, f"{device.home}/venv"], QUICK_S_MAX).ok:
        return
    _send_wheels(house, f"{device.home}/wheels", transport, say)
    say("making the environment")
    _make_venv(device, facts, venv, system_site, transport)
    _pip_install(device, house, venv, transport)
    _check_engine(device, engine, venv, transport)
    switch = (
        'touch "$1/.complete" && ln -sfn "$1" "$2.new" && mv -T "$2.new" "$2" && rm -rf "$3"'  # rename: at once or not
    )
    _must(transport, device, ["sh", "-c", switch, "sh", venv, f"{device.home}/venv", f"{device.home}/wheels"])
    done.changed.append("environment")


def _send_wheels(house: Wheelhouse, folder: str, transport: Transport, say: Say) -> None:
    """Send what is not there yet, so that an interrupted transfer goes on."""
    names = transport.run(["sh", "-c", 'cd "$1" && ls', "sh", folder], QUICK_S_MAX).stdout.split()
    paths = [f"{folder}/{name}" for name in names if name.endswith(".whl")]
    there = set(transport.run(sha256_command(*paths), INSTALL_S_MAX).stdout.split())
    todo = [wheel for wheel in house.wheels if _sha256(wheel.read_bytes()) not in there]
    size = sum(wheel.stat().st_size for wheel in todo)
    say(f"sending {len(todo)} wheels, {size / 1e6:.0f} MB")
    for wheel in todo:
        transport.put(wheel, f"{folder}/{wheel.name}")


def _make_venv(device: Device, facts: MachineFacts, venv: str, system_site: bool, transport: Transport) -> None:
    options = ["--system-site-packages"] if system_site else []
    made = transport.run([facts.python_path, "-m", "venv", "--clear", *options, venv], VENV_S_MAX)
    if made.ok:
        return
    said = made.stdout + made.stderr
    if "ensurepip" in said or "No module named venv" in said:
        raise DeviceError(
            f"{facts.python_path} on {device.name} cannot make virtual environments: run there, as root, "
            f"apt-get install python{facts.python}-venv, then bootstrap again"
        )
    raise DeviceError(f"{device.name}: {made.complaint()}")


def _pip_install(device: Device, house: Wheelhouse, venv: str, transport: Transport) -> None:
    command = [f"{venv}/bin/python", "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-index"]
    words = [*command, "--no-cache-dir", "--quiet", "--find-links", f"{device.home}/wheels", house.requirement]
    _must(transport, device, words, INSTALL_S_MAX)


def _check_engine(device: Device, engine: str, venv: str, transport: Transport) -> None:
    """Before anything points at the new environment: what serves goes on in the old one if its engine does not load."""
    program = "import sys; from edgert.engines import engine_by_name; engine_by_name(sys.argv[1]).version()"
    result = transport.run([f"{venv}/bin/python", "-c", program, engine], ENGINE_S_MAX)
    if result.ok:
        return
    said = (result.stderr.strip().splitlines() or [result.complaint()])[-1]
    transport.run(["rm", "-rf", venv, f"{device.home}/wheels"], VENV_S_MAX)
    raise EngineMissing(
        f"engine {engine} does not load on {device.name}: {said[-300:]}; what was there before serves on"
        + ("; TensorRT comes with JetPack: apt-get install tensorrt" if engine == "tensorrt" else "")
    )


def _remove_old_environments(device: Device, transport: Transport) -> None:
    """Once the new one has shown that it works: flash is small."""
    script = 'cd "$1/venvs" && for old in *; do test "$1/venvs/$old" = "$(readlink "$1/venv")" || rm -rf "$old"; done'
    transport.run(["sh", "-c", script, "sh", device.home], VENV_S_MAX)


def _configure(
    device: Device,
    profile: DeviceProfile,
    facts: MachineFacts,
    wishes: Wishes,
    has_unit: bool,
    transport: Transport,
    done: Bootstrapped,
) -> DeviceConfig:
    """Bring keys and configuration there; each file is written only where it differs. What is configured now."""
    state = device.state
    made = _must(transport, device, ["sh", "-c", 'mkdir -p "$1/keys" && chmod 755 "$1"', "sh", state])
    assert made.ok
    for key in wishes.keys:
        if _put(transport, f"{state}/keys/{key.key_id}.pem", key.pem()):
            done.changed.append(f"key {key.key_id}")
    ours: dict[str, Any] = {
        "device": device.name,
        "site": device.site,
        "profile": profile.name,
        "machine": facts.machine,
    }
    if has_unit and facts.uid == 0:
        ours["socket"] = profile.socket  # systemd makes its folder under /run
    if wishes.broker is not None:
        ours["mqtt"] = _send_broker(wishes.broker, state, transport, done)
    present = transport.run(["cat", f"{state}/config.toml"], QUICK_S_MAX)
    for name, value in wishes.settings.items():
        ours[name] = {**ours.get(name, {}), **value} if isinstance(value, dict) else value
    text = merged_config(present.stdout if present.ok else "", ours)
    # What the daemon would refuse is refused here, before it is written.
    config = parse_config(text, f"{state}/config.toml")
    if _put(transport, f"{state}/config.toml", text.encode()):
        done.changed.append("configuration")
    return config


def check_settings(settings: dict[str, Any]) -> None:
    """Raises ConfigInvalid for what no device's config.toml may hold, before any device is asked."""
    fixed = {"device": "any", "profile": "any"}
    parse_config(tomlkit.dumps({**fixed, **settings}), "--set")


def broker_doubt(broker: Broker) -> str:
    """Why devices may not reach the broker, as far as this host can tell; "" where it can be reached from here."""
    try:
        socket.create_connection((broker.host, broker.port), BROKER_S_MAX).close()
        return ""
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return (
            f"broker {broker.host}:{broker.port} cannot be reached from this host ({reason}); "
            "devices keep their reports until they can reach it"
        )


def merged_config(present: str, ours: dict[str, Any]) -> str:
    """The device's configuration with our values in it; what the user wrote besides, comments too, stays."""
    try:
        document = tomlkit.parse(present)
    except TOMLKitError as error:
        raise ConfigInvalid(f"the device's config.toml is not TOML ({error}): repair or remove it there") from error
    for key, value in ours.items():
        if isinstance(value, dict):
            table: Any = document.setdefault(key, tomlkit.table())
            for inner, given in value.items():
                if table.get(inner) != given:
                    table[inner] = given
        elif document.get(key) != value:
            document[key] = value
    return tomlkit.dumps(document)


def _send_broker(broker: Broker, state: str, transport: Transport, done: Bootstrapped) -> dict[str, Any]:
    table: dict[str, Any] = {"host": broker.host, "port": broker.port, "tls": broker.ca is not None}
    if broker.username:
        table["username"] = broker.username
    for source, name, key, mode in (
        (broker.password_file, "mqtt-password", "password_file", 0o600),
        (broker.ca, "mqtt-ca.pem", "ca", 0o644),
    ):
        if source is None:
            continue
        try:
            data = source.read_bytes()
        except OSError as error:
            raise ConfigInvalid(f"cannot read {source}: {error.strerror}") from error
        table[key] = f"{state}/{name}"
        if _put(transport, table[key], data, mode):
            done.changed.append(name)
    return table


def _put(transport: Transport, remote: str, data: bytes, mode: int = 0o644) -> bool:
    """Make `remote` hold `data`; whether it did not yet."""
    there = transport.run(sha256_command(remote), QUICK_S_MAX)
    if there.ok and there.stdout.strip() == _sha256(data):
        return False
    with tempfile.NamedTemporaryFile() as file:  # made readable by its owner only
        file.write(data)
        file.flush()
        transport.put(Path(file.name), remote, mode=mode)
    return True


def _must(transport: Transport, device: Device, argv: list[str], timeout_s: float = QUICK_S_MAX) -> Any:
    result = transport.run(argv, timeout_s)
    if not result.ok:
        raise DeviceError(f"{device.name}: {result.complaint()}")
    return result


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
