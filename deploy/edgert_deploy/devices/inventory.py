"""The inventory: the user's list of devices, one TOML table each.

    [devices.kitchen]
    transport = "ssh"
    address = "pi@10.0.0.7"            # ~/.ssh/config may give the user and the port
    host_key = "ssh-ed25519 AAAA..."   # the only host key that is accepted
    profile = "raspberry-pi-4"
    state = "/home/pi/.local/state/edgert"
    home = "/home/pi/.local/share/edgert"
    site = "plant-1"
    groups = ["canary"]
    tags = ["rack=3", "outdoors"]
    jump = "ops@bastion"               # a jump host
    jump_host_key = "ssh-ed25519 AAAA..."

People edit this file, so a command keeps the comments and the order. A command replaces the file in one step or leaves
it unchanged. `--inventory` names the file. Without this option, commands use the project's inventory
(edgert_deploy.common.project).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from edgert.durable import locked, os_error_as, replace_file
from edgert.errors import ConfigInvalid
from edgert.names import NAME, NAME_RULE, checked_id
from edgert.printable import some_of
from edgert.toml_file import about, from_table, parse_toml, read_text
from edgert.typed_json import Closed
from edgert_deploy.common.addresses import host_and_port
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.selector import ALL, KNOWN_SHOWN_MAX, select
from edgert_deploy.devices.transports import TRANSPORTS, TransportKind

TAG = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}(=[A-Za-z0-9_.+:/@-]{1,63})?")
TAGS_MAX = 64
LISTS = ("groups", "tags")
DEVICES_MAX = 10_000
INVENTORY_BYTES_MAX = 16 * 1024**2


@dataclass(frozen=True)
class Device(Closed):
    """One device of the inventory.

    Attributes:
        transport: A key of TRANSPORTS.
        address: [USER@]HOST[:PORT] for ssh, the state folder for local.
        state: The folder of `edgertd --state`.
        home: The folder in which bootstrap installs; "" for local.
        host_key: The only host key that is accepted, as an OpenSSH public key line.
        identity: The file of the private key for the login; "" leaves the choice to ~/.ssh/config and the agent.
        jump, jump_host_key: The address and the host key of a jump host; if "", ~/.ssh/config decides.
        become: "sudo" if commands run as root through sudo, else "".
        same_machine: Whether another device may have the same host key.
    """

    name: str
    transport: str
    address: str
    profile: str
    state: str
    home: str = ""
    host_key: str = ""
    identity: str = ""
    site: str = "default"
    groups: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    jump: str = ""
    jump_host_key: str = ""
    become: str = ""
    same_machine: bool = False

    @property
    def kind(self) -> TransportKind:
        """The capabilities of the device's transport. Raises ConfigInvalid for an unknown transport."""
        if self.transport not in TRANSPORTS:
            known = ", ".join(TRANSPORTS)
            raise ConfigInvalid(f"device {self.name} has transport {self.transport!r} in the inventory; known: {known}")
        return TRANSPORTS[self.transport]

    @property
    def python(self) -> str:
        """The interpreter on the device that can import edgert."""
        return f"{self.home}/venv/bin/python" if self.kind.needs_runtime else sys.executable

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the fingerprint of the host key (None if there is no host key)."""
        lists = {key: list(getattr(self, key)) for key in LISTS}
        return {**asdict(self), **lists, "fingerprint": fingerprint(self.host_key) if self.host_key else None}


@dataclass(frozen=True)
class SshAddress:
    """[USER@]HOST[:PORT]. If a field is None, ~/.ssh/config and the defaults decide."""

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> SshAddress:
        """Parse an address. With a port, IPv6 needs brackets: pi@[fe80::1]:2222. Raises ConfigInvalid."""
        user, at, rest = text.rpartition("@")
        # The host and the user become words of shell commands, such as a ProxyCommand.
        odd = any(c.isspace() or c in "'\"`$;&<>|(){}\\/" for c in text) or text.startswith("-") or rest.startswith("-")
        if odd or (at and not user):
            raise ConfigInvalid(f"{text!r} is not an address: give [USER@]HOST[:PORT]")
        host, port = host_and_port(rest, 0)
        return cls(host, user or None, port or None)


class Inventory:
    """An inventory file. Every method reads it again; a change locks it against other commands."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def devices(self) -> list[Device]:
        """Return every device in the file's order; [] if the file is missing. Raises ConfigInvalid."""
        return _devices(self._read(), self.path)

    def device(self, selector: str) -> Device:
        """Return the one device that `selector` matches. Raises ConfigInvalid if it matches several."""
        chosen = self.select(selector)
        if len(chosen) > 1:
            names = some_of([device.name for device in chosen], KNOWN_SHOWN_MAX)
            raise ConfigInvalid(f"{selector!r} selects {len(chosen)} devices ({names}): this command takes one")
        return chosen[0]

    def select(self, selector: str) -> list[Device]:
        """Return the devices that `selector` matches (see devices/selector.py). Raises ConfigInvalid."""
        return select(self.devices(), selector, self.path)

    def check_new(self, device: Device) -> None:
        """Check a new device before any connection to it. Raises ConfigInvalid if `add` would raise it."""
        self._check_new(device, self.devices())

    def add(self, device: Device) -> None:
        """Add a device. Raises ConfigInvalid if the name is invalid or belongs to a device or a group."""
        _check_device(device, f"device {device.name}")
        with self._changing() as document:
            self._check_new(device, _devices(document, self.path))
            tables = document.setdefault("devices", tomlkit.table(is_super_table=True))
            tables[device.name] = _change_table(tomlkit.table(), None, device)
            self._write(document)

    def remove(self, name: str) -> Device:
        """Remove a device and return it. Raises ConfigInvalid for an unknown name."""
        with self._changing() as document:
            (removed,) = select(_devices(document, self.path), name, self.path, groups=False)
            before = tomlkit.dumps(document)
            del document["devices"][name]
            self._write(document, _without_table(before, name))
            return removed

    def change(self, names: Sequence[str], edit: Callable[[Device], Device]) -> list[Device]:
        """Apply `edit` to the present entry of each of these devices in the file. Return the changed devices.

        Changes by other commands stay, and so do the order and the comments. Raises ConfigInvalid for an unknown name
        and for an invalid device.
        """
        with self._changing() as document:
            present = _devices(document, self.path)
            changed = []
            for name in names:
                (before,) = select(present, name, self.path, groups=False)
                after = edit(before)
                if after != before:
                    _check_device(after, f"device {name}")
                    _change_table(document["devices"][name], before, after)
                    changed.append(after)
            new = {device.name: device for device in changed}
            _check_groups([new.get(device.name, device) for device in present], self.path)
            self._write(document)
        return changed

    def _check_new(self, device: Device, present: list[Device]) -> None:
        _check_words(device, f"device {device.name}")
        for path in (device.state, device.home) if device.kind.uses_ssh else ():
            if odd := next((c for c in path if not c.isprintable() or c in "'\"\\`$*?[]|"), ""):
                # shebang lines, `find` and `sed` do not support these characters
                raise ConfigInvalid(
                    f"device {device.name}: the folder {path!r} has {odd!r} in its name, and programs on the device do not "
                    "start from such a path: give other folders with --state and --home"
                )
        if device.name in {d.name for d in present}:
            raise ConfigInvalid(
                f"{self.path} already has a device {device.name!r}: change it with edgert device set {device.name}, or "
                f"remove it with edgert device remove {device.name}"
            )
        _check_groups([*present, device], self.path)

    def _read(self) -> tomlkit.TOMLDocument:
        try:
            text = read_text(self.path, INVENTORY_BYTES_MAX)
        except ConfigInvalid as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return tomlkit.document()
            raise
        try:
            return tomlkit.parse(text)
        except (ValueError, TOMLKitError) as error:
            parse_toml(text, f"inventory {self.path}")  # tomlkit reports a wrong line if the end of the file is missing
            raise ConfigInvalid(f"inventory {self.path} cannot be read: {error}") from error

    @contextmanager
    def _changing(self) -> Iterator[tomlkit.TOMLDocument]:
        """Lock and read the file. The caller changes the document and writes it."""
        with os_error_as(ConfigInvalid, f"cannot write inventory {self.path}"):
            target = self.path.resolve()  # a link to the file and the file itself have the same lock
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = locked(target.with_name(f".{target.name}.lock"))
        with lock:
            yield self._read()

    def _write(self, document: tomlkit.TOMLDocument, better: str | None = None) -> None:
        """Replace the file by `better`, or else by tomlkit's text, if the text has the content of `document`.

        Raises ConfigInvalid if neither has it: tomlkit writes some mixtures of tables and dotted keys wrongly.
        """
        devices = document.unwrap().get("devices") or {}
        texts = (better, tomlkit.dumps(document))
        text = next((text for text in texts if text is not None and _tables_in(text) == devices), None)
        if text is None:
            raise ConfigInvalid(
                f"{self.path} has a form that edgert cannot change, and stays as it is: write every device as a table "
                "[devices.NAME], then try again"
            )
        _replace_file(self.path, text.encode())


def find_inventory(given: Path | None = None) -> Inventory:
    """Return the inventory of the file `given`, else the project's inventory."""
    return Inventory(find_project().inventory if given is None else given)


def fingerprint(host_key: str) -> str:
    """Return SHA256:... of an OpenSSH public key line, as ssh-keygen -l shows it. Raises ConfigInvalid."""
    try:
        blob = base64.b64decode(host_key.split()[1], validate=True)
    except (IndexError, binascii.Error) as error:
        raise ConfigInvalid(f"{host_key[:60]!r} is not a host key: give a line like `ssh-ed25519 AAAA...`") from error
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _check_name(what: str, name: str) -> None:
    if name == ALL or not NAME.fullmatch(name):
        raise ConfigInvalid(f"invalid {what} name {name!r}: {NAME_RULE}, not {ALL!r}")


def _check_tags(tags: Sequence[str]) -> None:
    for tag in tags:
        if not TAG.fullmatch(tag):
            raise ConfigInvalid(
                f"invalid tag {tag!r}: give KEY or KEY=VALUE, the key of a-z 0-9 _ . - (at most 63), the value "
                "of letters, digits and _ . + : / @ - (at most 63)"
            )
    keys = [tag.partition("=")[0] for tag in tags]
    if len(tags) > TAGS_MAX or len(set(keys)) != len(keys):
        raise ConfigInvalid(f"give at most {TAGS_MAX} tags, each key once; got {', '.join(tags)[:200]}")


def _check_groups(devices: list[Device], path: Path) -> None:
    names = {d.name for d in devices}
    for device in devices:
        for group in names.intersection(device.groups):
            raise ConfigInvalid(f"{path}: {group!r} is a device and a group of {device.name}: rename one of them")


def _devices(document: tomlkit.TOMLDocument, path: Path) -> list[Device]:
    value = document.unwrap()
    tables = value.get("devices", {})
    if not isinstance(tables, dict) or set(value) - {"devices"}:
        raise ConfigInvalid(f"{path}: every device is a table [devices.NAME]; found {', '.join(map(str, value))}")
    if len(tables) > DEVICES_MAX:
        raise ConfigInvalid(
            f"{path} has {len(tables)} devices; the limit is {DEVICES_MAX}: divide it into several projects"
        )
    devices = [_device(name, table, path) for name, table in tables.items()]
    _check_groups(devices, path)
    return devices


def _device(name: str, table: Any, path: Path) -> Device:
    where = f"[devices.{name}] in {path}"
    if isinstance(table, dict):
        if "name" in table:
            raise ConfigInvalid(f"{where} has an unknown key 'name': the name of the table is the name of the device")
        table = {**table, "name": name}
    device = from_table(Device, table, where)
    # The daemon, its unit and the scripts compare these paths as text, so each path gets its normal form here. For
    # example, a shell completes the name of a folder with a slash.
    paths = {key: posixpath.normpath(path) for key in ("state", "home") if (path := getattr(device, key))}
    device = replace(device, **paths)
    _check_device(device, where)
    return device


def _check_words(device: Device, where: str) -> None:
    """Check the user's values: names, tags and addresses. Raises ConfigInvalid."""
    with about(where):
        _check_name("device", device.name)
        for group in device.groups:
            _check_name("group", group)
        _check_tags(device.tags)
        checked_id("device", device.name)
        checked_id("site", device.site)
        if device.kind.uses_ssh:
            SshAddress.parse(device.address)
        if device.jump:
            SshAddress.parse(device.jump)


def _check_device(device: Device, where: str) -> None:
    _check_words(device, where)
    uses_ssh = device.kind.uses_ssh
    jump, jump_key = bool(device.jump), bool(device.jump_host_key)
    holds = {
        "address of a local device must be its state folder": uses_ssh or device.address.startswith("/"),
        'become must be "sudo" or missing': device.become in ("", "sudo"),
        "state must be an absolute path": device.state.startswith("/"),
        "home must be an absolute path": device.home.startswith("/") or not uses_ssh,
        "host_key is required: remove the device and add it again": bool(device.host_key) or not uses_ssh,
        "jump and jump_host_key belong together, and to ssh: set them with edgert device set --jump": jump == jump_key
        and (uses_ssh or not jump),
    }
    for message, is_met in holds.items():
        if not is_met:
            raise ConfigInvalid(f"{where}: {message}")
    with about(where):
        if uses_ssh:
            fingerprint(device.host_key)
        if device.jump:
            fingerprint(device.jump_host_key)


def _tables_in(text: str) -> Any:
    """Return the tables of devices in a text; None if the text is not TOML."""
    try:
        return parse_toml(text, "").get("devices") or {}
    except ConfigInvalid:
        return None


def _without_table(text: str, name: str) -> str:
    """Return the text without the table of a device, and without the comment directly above the table.

    tomlkit would keep this comment and remove the comment of the next device.
    """
    lines = text.splitlines(keepends=True)
    headings = [i for i, line in enumerate(lines) if line.lstrip().startswith("[")]
    heading = re.compile(rf"\s*\[\s*devices\s*\.\s*(['\"]?){re.escape(name)}\1\s*\]")
    begin = next((i for i in headings if heading.match(lines[i])), len(lines))
    end = next((i for i in headings if i > begin), len(lines))
    while end > begin and lines[end - 1].lstrip()[:1] in ("", "#"):
        end -= 1
    above = begin
    while above > 0 and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    begin = above or begin  # a comment from the first line on is about the whole file
    if lines[begin - 1 : begin] and not lines[begin - 1].strip() and lines[end : end + 1] and not lines[end].strip():
        end += 1  # one of the two empty lines goes, too
    return "".join(lines[:begin] + lines[end:])


def _change_table(table: Table, before: Device | None, after: Device) -> Table:
    """Write the changed fields into the device's table and return the table. Omit default values."""
    for field in fields(Device):
        value = getattr(after, field.name)
        if field.name == "name" or (before is not None and value == getattr(before, field.name)):
            continue
        if value == field.default:
            table.pop(field.name, None)
        else:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return table


def _replace_file(path: Path, data: bytes) -> None:
    """Replace the file in one step. A link stays a link, and the mode stays the same."""
    target = path.resolve()
    advice = "check the folder's rights and its free space"
    with os_error_as(ConfigInvalid, f"cannot write inventory {path}", advice):
        replace_file(target, data, mode=target.stat().st_mode & 0o777 if target.exists() else 0o644)
