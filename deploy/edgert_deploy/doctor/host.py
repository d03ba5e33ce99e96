"""The checks of this host: Python, packages, engines, keys, ssh, inventory, servers, free space."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import paramiko

from edgert import __version__
from edgert.bundle.signing import read_public_key, read_signing_key
from edgert.engines import ENGINES, FOR_TESTS, engine_by_name
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.extras import EXTRAS, missing_package
from edgert.printable import counted, endpoint
from edgert.registry.artifacts import EMPTY, blob_of
from edgert_deploy.common.addresses import PORT_PLAIN, PORT_TLS, host_and_port
from edgert_deploy.common.folders import cache_folder, config_folder
from edgert_deploy.common.keys import (
    PRIVATE_SUFFIX,
    PUBLIC_SUFFIX,
    key_paths,
    others_may_use,
    public_keys,
    restore_public_halves,
)
from edgert_deploy.common.project import find_project
from edgert_deploy.common.registry import open_registry
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.devices.profiles import list_profiles
from edgert_deploy.devices.transports.ssh_config import read_ssh_config
from edgert_deploy.doctor import HOST, Finding, Report

PYTHON_RANGE = ((3, 10), (3, 13))
# The builders need these packages.
BUILDERS = ("onnx", "nncf", "sympy", "flatbuffers")
DEPLOYERS = ("fabric", "tomlkit", "packaging", "pip")
FLEET = tuple(module for module, extras in EXTRAS.items() if "fleet" in extras)
FREE_MB_FAIL, FREE_MB_WARN = 200, 2048
BROKER_S_MAX = 5.0


def check_host(inventory: Inventory) -> list[Finding]:
    """Run every check. If a check raises an unexpected error, this error becomes a finding."""
    checks: tuple[tuple[str, Callable[[Report], None]], ...] = (
        ("python", _python),
        ("packages", _packages),
        ("engines", _engines),
        ("signing key", _signing_key),
        ("ssh", _ssh),
        ("inventory", lambda report: _inventory(report, inventory)),
        ("profiles", _profiles),
        ("broker", _broker),
        ("registry", _registry),
        ("disk", _disk),
    )
    report = Report(HOST, ConfigInvalid.exit_code)
    for check, look in checks:
        try:
            look(report)
        except (EdgeRTError, OSError, ImportError) as error:
            report.fail(check, str(missing_package(error) or error), "follow the advice in the message")
    return report.found


def signing_keys() -> dict[str, str]:
    """Return {key id: name} of the keys that this host knows. `check_host` reports damaged files."""
    keys = {}
    for path in public_keys():
        try:
            keys[read_public_key(path).key_id] = path.name.removesuffix(PUBLIC_SUFFIX)
        except EdgeRTError:
            continue
    return keys


def _python(report: Report) -> None:
    lowest, highest = PYTHON_RANGE
    versions = f"Python {sys.version.split()[0]}, edgert {__version__}"
    if lowest <= sys.version_info[:2] <= highest:
        report.ok("python", versions)
    else:
        report.warn(
            "python", f"{versions}; edgert is tested with 3.10 to 3.13", "install edgert into one of these versions"
        )


def _packages(report: Report) -> None:
    for packages, extra, purpose, fails in (
        (DEPLOYERS, "host", "deploying", True),
        (BUILDERS, "host", "building", False),
        (FLEET, "fleet", "edgert fleet", False),
    ):
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if not missing:
            report.ok("packages", f"all packages for {purpose}")
        else:
            text, next_step = f"{', '.join(missing)} missing, for {purpose}", f"pip install 'edgert[{extra}]'"
            (report.fail if fails else report.warn)("packages", text, next_step)


def _engines(report: Report) -> None:
    for name, kind in ENGINES.items():
        if name in FOR_TESTS or kind.system_package:  # this host evaluates no artifact with these engines
            continue
        try:
            report.ok("engines", f"{name} {engine_by_name(name).version()}")
        except EdgeRTError as error:
            report.warn(
                "engines",
                f"{name} does not load, so its artifacts cannot be checked: {error.message}",
                "pip install 'edgert[host]'",
            )


def _signing_key(report: Report) -> None:
    folder, project = restore_public_halves(), find_project()
    privates = sorted(folder.glob(f"*{PRIVATE_SUFFIX}"))
    if not privates and not project.is_users and list(project.public_keys.glob(f"*{PUBLIC_SUFFIX}")):
        text = f"there is no key in {folder}: this host can deploy bundles of other hosts, but sign none"
        report.warn("signing key", text, "only to build here: edgert keys new --name NAME, then bootstrap --key NAME")
    elif not privates:
        report.fail("signing key", f"there is no key in {folder}", "edgert keys new, or copy your key into this folder")
    for path in privates:
        _check_key(report, path)
    if not project.is_users and folder.resolve().is_relative_to(project.root):
        report.warn(
            "signing key", f"{folder} is in the project", "keep keys outside the project: keys = ... in edgert.toml"
        )


def _check_key(report: Report, path: Path) -> None:
    name = path.name.removesuffix(PRIVATE_SUFFIX)
    try:
        key = read_signing_key(path)
        public = read_public_key(path.with_name(name + PUBLIC_SUFFIX))
    except EdgeRTError as error:
        report.fail("signing key", error.message, f"restore {name} from your backup, or: edgert keys new --name NAME")
        return
    mode, shared = path.stat().st_mode & 0o777, key_paths(find_project().public_keys, name)[1]
    if public.key_id != key.public.key_id:
        report.fail(
            "signing key", f"the private and the public key of {name} do not match", "restore both from your backup"
        )
    elif others_may_use(path):
        report.fail(
            "signing key", f"other users can read {path} (mode {mode:o})", f"chmod 600 {shlex.quote(str(path))}"
        )
    elif shared.exists() and read_public_key(shared).key_id != key.public.key_id:
        text = f"{name} is another key than {shared}: devices that trust the project's key refuse bundles signed with {name}"
        report.warn(
            "signing key", text, "use the project's key, or edgert keys new --name NAME, then bootstrap --key NAME"
        )
    else:
        report.ok("signing key", f"{name}: {key.public.key_id}")


def _ssh(report: Report) -> None:
    program = shutil.which("ssh")
    if program is None:
        report.warn("ssh", "ssh is missing; edgert ssh and edgert logs -f need it", "apt-get install openssh-client")
    else:
        report.ok("ssh", program)
    try:
        read_ssh_config()
    except ConfigInvalid as error:
        report.fail("ssh", error.message, "repair that file; ssh -G HOST checks it")
    keys = [path for path in Path("~/.ssh").expanduser().glob("id_*") if path.suffix != ".pub"]
    in_agent = 0
    if sock := os.environ.get("SSH_AUTH_SOCK", ""):
        try:
            with socket.socket(socket.AF_UNIX) as agent:
                agent.connect(sock)
            in_agent = len(paramiko.Agent().get_keys())
        except (OSError, paramiko.SSHException) as error:
            next_step = 'eval "$(ssh-agent)" && ssh-add'
            report.warn("ssh", f"no agent answers at SSH_AUTH_SOCK ({sock}): {error}", next_step)
    if in_agent or keys:
        report.ok("ssh", f"{counted(in_agent, 'key')} in the agent, {len(keys)} in ~/.ssh")
    else:
        report.warn("ssh", "no key in an agent or in ~/.ssh", "ssh-keygen -t ed25519, or add devices with --identity")


def _inventory(report: Report, inventory: Inventory) -> None:
    try:
        devices = inventory.devices()
    except ConfigInvalid as error:
        report.fail("inventory", error.message, f"repair {inventory.path}")
        return
    if devices:
        report.ok("inventory", f"{inventory.path}, devices: {len(devices)}")
    else:
        report.warn("inventory", f"no device in {inventory.path}", "edgert device add NAME USER@HOST")
    for device in devices:
        if device.identity and not Path(device.identity).expanduser().is_file():
            next_step = f"edgert device set {device.name} --identity FILE, or --no-identity"
            report.fail("inventory", f"{device.name}: identity {device.identity} is missing", next_step)


def _profiles(report: Report) -> None:
    report.ok("profiles", counted(len(list_profiles(find_project().profiles)), "profile"))


def _broker(report: Report) -> None:
    """Log in to the project's broker, like `edgert fleet watch`."""
    project = find_project()
    if not project.broker.address:
        return
    from edgert.telemetry.mqtt import BrokerRefused, Connection, MqttSettings

    broker = project.broker
    try:
        host, port = host_and_port(broker.address, PORT_TLS if broker.tls else PORT_PLAIN)
        settings = MqttSettings(host, port, **broker.login)
        with closing(Connection(settings, f"edgert-doctor-{uuid.uuid4().hex[:8]}")) as connection:
            connection.open(BROKER_S_MAX)
    except EdgeRTError as error:
        next_step = f"check that the broker runs, and [broker] in {project.root / 'edgert.toml'}"
        if isinstance(error, BrokerRefused) and not (broker.username or broker.cert):
            report.warn(
                "broker",
                error.message,
                f"{next_step}; or give fleet commands --username, if each device has its own login",
            )
            return
        report.fail("broker", error.message, next_step, error.exit_code)
        return
    report.ok("broker", f"{endpoint(host, port)} accepts the login")


def _registry(report: Report) -> None:
    defaults = find_project().registry
    if not defaults.address:
        return
    ca, login = (Path(file) if file else None for file in (defaults.ca, defaults.login))
    try:
        with closing(open_registry(defaults.address, ca, login)) as registry:
            registry.has(blob_of(EMPTY))
    except EdgeRTError as error:
        next_step = "repair [registry] in edgert.toml, or log in"
        report.fail("registry", error.message, next_step, error.exit_code)
    else:
        report.ok("registry", f"{defaults.address} answers")


def _disk(report: Report) -> None:
    for folder, variable, next_step in (
        (cache_folder(), "XDG_CACHE_HOME", f"remove {cache_folder()}: it is a cache"),
        (config_folder(), "EDGERT_CONFIG_DIR", "free some space on the disk of this folder"),
    ):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_mb = shutil.disk_usage(existing).free // 1024**2
        text = f"{free_mb} MB free for {folder}"
        if not os.access(existing, os.W_OK):
            report.fail("disk", f"{existing} is not writable", f"make it writable, or set {variable} to another folder")
        else:
            report.graded("disk", text, next_step, fails=free_mb < FREE_MB_FAIL, warns=free_mb < FREE_MB_WARN)
