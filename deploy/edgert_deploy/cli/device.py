"""`edgert device`: the devices of the inventory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from edgert.config import SOCKET_PATH_BYTES_MAX, StateDir
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.device_probe import probe_
from edgert_deploy.cli.device_set import set_
from edgert_deploy.cli.fleet_options import columns, emit, inventory_option, json_option
from edgert_deploy.cli.host_keys import DEVICE_KEY, JUMP_KEY, absolute, agreed_host_key
from edgert_deploy.devices.facts import describe, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import Device, SshAddress, find_inventory, fingerprint
from edgert_deploy.devices.profiles import list_profiles, load_profile


@click.group()
def device() -> None:
    """Add, ask, list, change and remove devices.

    \b
    Examples:
      edgert device add here --local ./device
      edgert device add kitchen pi@10.0.0.7 --group canary
      edgert device probe kitchen
      edgert device list tag:rack=3
      edgert device set kitchen --site plant-2
    """


device.add_command(probe_)
device.add_command(set_)


@device.command()
@click.argument("name")
@click.argument("address", required=False, metavar="[USER@HOST[:PORT]]")
@click.option(
    "--local", "folder", type=click.Path(file_okay=False, path_type=Path), help="This machine; its state lies here."
)
@click.option(
    "--profile", "profile_name", help="A name of devices/*.toml [default: the one that fits what the device says]."
)
@click.option("--fingerprint", "wanted", metavar="SHA256:...", help="The host key to accept; without it you are asked.")
@click.option(
    "--identity", type=click.Path(dir_okay=False, path_type=Path), help="Private SSH key [default: agent, ~/.ssh]."
)
@click.option("--sudo", is_flag=True, help="Act as root on it by sudo, which must ask for no password.")
@click.option("--group", "groups", multiple=True, help="A group to be in; may be given again.")
@click.option("--tag", "tags", multiple=True, metavar="KEY[=VALUE]", help="A tag; may be given again.")
@click.option("--jump", default="", metavar="[USER@]HOST[:PORT]", help="A machine that it is reached through.")
@click.option("--jump-fingerprint", metavar="SHA256:...", help="The jump host's key to accept.")
@click.option("--site", default="default", show_default=True, help="Where it stands; becomes part of its MQTT topics.")
@click.option("--home", help="Where bootstrap installs on the device [default: /opt/edgert, or ~/.local/share/edgert].")
@click.option("--state", help="The device's state folder [default: /var/lib/edgert, or ~/.local/state/edgert].")
@click.option("--devices", "devices_dir", type=click.Path(path_type=Path), help="Folder with device profiles.")
@inventory_option
@json_option
def add(
    name: str,
    address: str | None,
    folder: Path | None,
    profile_name: str | None,
    wanted: str | None,
    identity: Path | None,
    sudo: bool,
    groups: tuple[str, ...],
    tags: tuple[str, ...],
    jump: str,
    jump_fingerprint: str | None,
    site: str,
    home: str | None,
    state: str | None,
    devices_dir: Path | None,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Add a device, over SSH or this machine.

    Its SSH host key is shown and, once you agree, the only one ever accepted. There is no option to agree
    unseen: scripts give the fingerprint they expect. With --jump the jump host's key is pinned in the same way.
    What --user, --port and the like are to ssh may stand in ~/.ssh/config; ADDRESS may be a Host of it.
    The device is asked what it is; nothing is installed yet.

    \b
    Examples:
      edgert device add kitchen pi@10.0.0.7 --sudo
      edgert device add nuc-3 root@nuc-3:2222 --fingerprint SHA256:abc... --profile intel-nuc --group line-2
      edgert device add cam-7 pi@192.168.8.7 --jump ops@bastion --tag rack=3 --tag outdoors
      edgert device add here --local ./device
    """
    if (address is None) == (folder is None):
        raise click.UsageError("give either USER@HOST[:PORT] or --local DIR")
    inventory = find_inventory(inventory_file)
    if name in {d.name for d in inventory.devices()}:
        raise ConfigInvalid(f"{inventory.path} has a device {name} already: edgert device remove {name}")
    if folder is not None:
        draft = _local(name, folder)
        if jump:
            raise click.UsageError("--jump is for devices that are reached over SSH")
    else:
        assert address is not None  # one of both is given
        draft = Device(name, "ssh", address, "", state or "", identity=absolute(identity), jump=jump)
        draft = replace(draft, become="sudo" if sudo else "")
        if jump:
            key = agreed_host_key(SshAddress.parse(jump), jump_fingerprint, JUMP_KEY)
            draft = replace(draft, jump_host_key=key)
        draft = replace(draft, host_key=agreed_host_key(SshAddress.parse(address), wanted, DEVICE_KEY, draft))
    draft = replace(draft, site=site, groups=groups, tags=tags)
    known, facts_line = _completed(draft, profile_name, home, state, devices_dir)
    inventory.add(known)
    text = f"{name} is a {known.profile} ({facts_line}); it stands in {inventory.path}"
    emit({"device": known.as_json(), "inventory": str(inventory.path)}, text, as_json)
    click.echo(f"next: edgert bootstrap {name}", err=True)


@device.command("list")
@click.argument("selector", default="all")
@inventory_option
@json_option
def list_(selector: str, inventory_file: Path | None, as_json: bool) -> None:
    """List the devices of SELECTOR.

    Words separated by commas: names, groups, `all`, tag:KEY, tag:KEY=VALUE, site:NAME, profile:NAME; `!` before a
    word leaves its devices out. Every command that takes a SELECTOR reads it so.

    \b
    Examples:
      edgert device list canary,kitchen
      edgert device list 'site:plant-1,!tag:outdoors'
    """
    inventory = find_inventory(inventory_file)
    present = inventory.devices()
    devices = inventory.select(selector) if present else []
    rows = [("NAME", "PROFILE", "ADDRESS", "SITE", "GROUPS", "TAGS", "HOST KEY")]
    rows += [
        (
            d.name,
            d.profile,
            _way(d),
            d.site,
            ",".join(d.groups) or "-",
            ",".join(d.tags) or "-",
            fingerprint(d.host_key) if d.host_key else "-",
        )
        for d in devices
    ]
    text = columns(rows) if devices else f"{inventory.path} has no device yet: edgert device add"
    emit({"devices": [d.as_json() for d in devices], "inventory": str(inventory.path)}, text, as_json)
    if devices:
        click.echo("next: edgert status says what they serve; edgert bootstrap NAME sets one up", err=True)


@device.command()
@click.argument("name")
@inventory_option
@json_option
def remove(name: str, inventory_file: Path | None, as_json: bool) -> None:
    """Take a device out of the inventory. On the device itself nothing changes.

    \b
    Example:
      edgert device remove kitchen
    """
    inventory = find_inventory(inventory_file)
    gone = inventory.remove(name)
    text = f"{name} is out of {inventory.path}; it goes on serving what it has in {gone.state}"
    emit({"removed": gone.as_json(), "inventory": str(inventory.path)}, text, as_json)


def _way(known: Device) -> str:
    return f"{known.address} through {known.jump}" if known.jump else known.address


def _local(name: str, folder: Path) -> Device:
    state = folder.resolve()
    for socket in (state / "edgert.sock", StateDir(state).control_socket):
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigInvalid(
                f"{socket} is too long for a socket (at most {SOCKET_PATH_BYTES_MAX} bytes): give a shorter --local"
            )
    return Device(name, "local", str(state), "", str(state))


def _completed(
    draft: Device, profile_name: str | None, home: str | None, state: str | None, devices_dir: Path | None
) -> tuple[Device, str]:
    """The device with what it says of itself filled in, and that in one line."""
    from edgert_deploy.devices.transports import open_transport

    transport = open_transport(draft)
    try:
        facts = probe(transport, draft.name)
    finally:
        transport.close()
    local = not draft.kind.needs_runtime
    if profile_name is None:
        profile = pick_profile(list_profiles(devices_dir), facts, local=local)
    else:
        profile = load_profile(profile_name, devices_dir)
        for reason in misfits(profile, facts):
            click.echo(f"warning: profile {profile.name} {reason}; the device is {describe(facts)}", err=True)
    filled = {
        "profile": profile.name,
        "state": draft.state or facts.default_state,
        "home": "" if local else home or facts.default_home,
    }
    return Device(**{**vars(draft), **filled}), describe(facts)
