"""`edgert device add`: add a machine over SSH, or this machine, to the inventory as a device."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgert.cli.output import emit, json_option
from edgert.errors import ConfigInvalid
from edgert.state_dir import SOCKET_PATH_BYTES_MAX, StateDir
from edgert_deploy.cli.device.host_keys import identity_path, pinned
from edgert_deploy.cli.shared.option_groups import SectionedCommand, each_of, given_option, section
from edgert_deploy.cli.shared.options import inventory_option, profiles_option, same_machine_option
from edgert_deploy.cli.shared.output import say
from edgert_deploy.cli.shared.types import FILE, FolderPath, ProfileName
from edgert_deploy.devices.facts import describe, local_facts, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import list_profiles, load_profile, own_profiles
from edgert_deploy.devices.same_machine import refuse_same_machine
from edgert_deploy.devices.transports import open_transport


@click.command(cls=SectionedCommand)
@click.argument("name")
@click.argument("address", required=False, metavar="[USER@HOST[:PORT]]")
@each_of(
    *section(
        "Login",
        click.option(
            "--fingerprint",
            "wanted",
            metavar="SHA256:...",
            help="The host key to accept [default: the command asks you].",
        ),
        click.option("--identity", type=FILE, help="Private SSH key [default: agent, ~/.ssh]."),
        click.option("--sudo", is_flag=True, help="Use sudo on the device; sudo must not ask for a password."),
        click.option("--jump", default="", metavar="[USER@]HOST[:PORT]", help="A jump host to the device."),
        click.option("--jump-fingerprint", metavar="SHA256:...", help="The jump host's key to accept."),
    )
)
@each_of(
    *section(
        "Place in the fleet",
        click.option(
            "--profile",
            "profile_name",
            type=ProfileName(),
            help="A device profile [default: the profile that fits the device].",
        ),
        click.option(
            "--site",
            metavar="SITE",
            default="default",
            show_default=True,
            help="The device's site, part of its MQTT topics.",
        ),
        click.option("--group", "groups", multiple=True, metavar="GROUP", help="A group to join. May be repeated."),
        click.option("--tag", "tags", multiple=True, metavar="KEY[=VALUE]", help="A tag. May be repeated."),
    )
)
@each_of(
    *section(
        "Folders",
        click.option("--local", "folder", type=FolderPath(), help="Use this machine, with its state in this folder."),
        click.option(
            "--home",
            metavar="DIR",
            help="The folder on the device where bootstrap installs [default: /opt/edgert, or ~/.local/share/edgert].",
        ),
        click.option(
            "--state",
            metavar="DIR",
            help="The device's state folder [default: /var/lib/edgert, or ~/.local/state/edgert].",
        ),
    )
)
@same_machine_option
@profiles_option
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
    same_machine: bool,
    profiles_dir: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Add a device to the inventory: over SSH, or this machine.

    The command shows the device's SSH host key. After you agree to this key, EdgeRT accepts no other key from the
    device. Scripts pass --fingerprint with the expected key; no option accepts every key. With --jump, the command pins
    the jump host's key in the same way. The address may be a Host of ~/.ssh/config; that file may also set user and
    port. The command reads the device's facts, and installs nothing.

    \b
    Examples:
      edgert device add kitchen pi@10.0.0.7 --sudo
      edgert device add nuc-3 root@nuc-3:2222 --fingerprint SHA256:abc... --profile intel-nuc --group line-2
      edgert device add cam-7 pi@192.168.8.7 --jump ops@bastion --tag rack=3 --tag outdoors
      edgert device add here --local ./device
    """
    if (address is None) == (folder is None):
        raise click.UsageError("give either USER@HOST[:PORT] or --local DIR")
    if profile_name is not None:
        load_profile(profile_name, profiles_dir)
    chosen: dict[str, Any] = {"site": site, "groups": groups, "tags": tags, "same_machine": same_machine}
    if folder is not None:
        if option := given_option("jump", "jump_fingerprint", "wanted", "identity", "sudo", "home", "state"):
            raise click.UsageError(f"{option} is for a device over SSH: omit it with --local")
        draft = replace(_local(name, folder), **chosen)
        inventory.check_new(draft)
    else:
        assert address is not None  # checked above: either --local or the address is given
        draft = Device(name, "ssh", address, "", state or "", identity=identity_path(identity), jump=jump)
        draft = replace(draft, become="sudo" if sudo else "", **chosen)
        inventory.check_new(draft)
        draft = pinned(draft, wanted, jump_fingerprint)
    refuse_same_machine([draft], inventory.devices())
    completed, facts_line = _completed(draft, profile_name, home, profiles_dir)
    inventory.add(completed)
    text = f"added {name} to {inventory.path} with profile {completed.profile} ({facts_line})"
    emit({"device": completed.as_json(), "inventory": str(inventory.path)}, text, as_json)
    say("", f"next: edgert bootstrap {name}")


def _local(name: str, folder: Path) -> Device:
    state = folder.resolve()
    for socket in (state / "edgert.sock", StateDir(state).control_socket):
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigInvalid(
                f"{socket} is too long for a socket (at most {SOCKET_PATH_BYTES_MAX} bytes): choose a shorter --local"
            )
    return Device(name, "local", str(state), "", str(state))


def _completed(
    draft: Device, profile_name: str | None, home: str | None, profiles_dir: Path | None
) -> tuple[Device, str]:
    """Read the device's facts. Return the device with its profile and folders, and a line about the facts."""
    with closing(open_transport(draft)) as transport:
        facts = probe(transport, draft.name)
    if local := not draft.kind.needs_runtime:
        facts = local_facts(facts)
    if profile_name is None:
        profile = pick_profile(list_profiles(profiles_dir), facts, local=local, own=own_profiles(profiles_dir))
    else:
        profile = load_profile(profile_name, profiles_dir)
        for reason in misfits(profile, facts).values():
            say("", f"warning: profile {profile.name} {reason}; the device is {describe(facts)}")
    home = "" if local else home or facts.default_home
    completed = replace(draft, profile=profile.name, state=draft.state or facts.default_state, home=home)
    return completed, describe(facts)
