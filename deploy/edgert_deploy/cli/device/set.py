"""`edgert device set`: change devices in the inventory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from edgert.cli.output import emit, json_option, progress
from edgert_deploy.cli.device.host_keys import DEVICE_KEY, JUMP_KEY, agreed_host_key, identity_path
from edgert_deploy.cli.shared.option_groups import SectionedCommand, gathered, section
from edgert_deploy.cli.shared.options import inventory_option, profiles_option, selector_argument
from edgert_deploy.cli.shared.types import FILE, ProfileName
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import load_profile


@dataclass(frozen=True)
class LoginChange:
    """The changes to the login of a device."""

    address: str | None
    repin: bool
    fingerprint: str | None
    jump: str | None
    jump_fingerprint: str | None
    no_jump: bool
    identity: Path | None
    no_identity: bool

    @property
    def repins(self) -> bool:
        return self.repin or self.fingerprint is not None

    def check(self, selector: str, devices: Sequence[Device]) -> None:
        """Refuse changes for one device if several are selected, and SSH changes for devices without SSH."""
        if self.no_jump and self.jump:
            raise click.UsageError("--jump and --no-jump exclude each other: choose one")
        of_one = self.address is not None or self.repins
        if len(devices) > 1 and of_one:
            raise click.UsageError(
                f"--address, --repin and --fingerprint are for one device; {selector!r} selects {len(devices)}: "
                "name one device"
            )
        of_ssh = of_one or self.jump is not None or self.identity is not None
        if of_ssh and (without_ssh := [device.name for device in devices if not device.kind.uses_ssh]):
            raise click.UsageError(
                f"{', '.join(without_ssh)}: this machine has no address, host key, jump host or SSH key to set. Select only "
                "devices over SSH, or omit these options"
            )

    def fields(self, device: Device) -> dict[str, Any]:
        """Return the fields to change. The user, or the expected fingerprint, confirms a new host key."""
        changes: dict[str, Any] = {}
        if self.address is not None:
            changes["address"] = self.address
        if self.identity is not None or self.no_identity:
            changes["identity"] = identity_path(self.identity)
        if self.jump is not None:
            key = agreed_host_key(self.jump, self.jump_fingerprint, JUMP_KEY)
            changes.update(jump=self.jump, jump_host_key=key)
        elif self.no_jump:
            changes.update(jump="", jump_host_key="")
        if self.repins:
            moved = replace(device, **changes)
            changes["host_key"] = agreed_host_key(moved.address, self.fingerprint, DEVICE_KEY, moved)
        return changes


@dataclass(frozen=True)
class PlaceChange:
    """The changes to the place of a device in the fleet."""

    profile: str | None
    site: str | None
    groups: tuple[str, ...]
    ungroup: tuple[str, ...]
    tags: tuple[str, ...]
    untag: tuple[str, ...]

    def fields(self, profiles_dir: Path | None) -> dict[str, Any]:
        """Return the new site and profile. Raises ConfigInvalid for an unknown profile."""
        changes = {} if self.site is None else {"site": self.site}
        if self.profile is not None:
            changes["profile"] = load_profile(self.profile, profiles_dir).name
        return changes

    def listed(self, device: Device) -> Device:
        """Add and remove groups and tags. Return the changed device."""
        stay = [group for group in device.groups if group not in self.ungroup]
        replaced = {_key(tag) for tag in (*self.tags, *self.untag)}
        return replace(
            device,
            groups=tuple(dict.fromkeys([*stay, *self.groups])),
            tags=tuple(dict.fromkeys([*(tag for tag in device.tags if _key(tag) not in replaced), *self.tags])),
        )


# The command receives these options as `login`.
_login_options = gathered(
    "login",
    LoginChange,
    *section(
        "Login",
        click.option(
            "--address", metavar="[USER@]HOST[:PORT]", help="The device's new address; the pinned host key stays."
        ),
        click.option("--repin", is_flag=True, help="Show the device's present host key. Pin the key after you agree."),
        click.option("--fingerprint", metavar="SHA256:...", help="Pin the host key with this fingerprint."),
        click.option(
            "--jump", metavar="[USER@]HOST[:PORT]", help="The jump host to the device; the jump host's key is pinned."
        ),
        click.option("--jump-fingerprint", metavar="SHA256:...", help="The jump host's key to accept."),
        click.option(
            "--no-jump", is_flag=True, help="Remove the jump host from the inventory. ~/.ssh/config may still name one."
        ),
        click.option("--identity", type=FILE, help="Private SSH key."),
        click.option("--no-identity", is_flag=True, help="Use the keys of the agent and ~/.ssh."),
    ),
)

# The command receives these options as `place`.
_place_options = gathered(
    "place",
    PlaceChange,
    *section(
        "Place in the fleet",
        click.option("--profile", type=ProfileName(), help="A device profile. Takes effect at the next bootstrap."),
        click.option(
            "--site",
            metavar="SITE",
            help="The device's site, part of its MQTT topics. Takes effect at the next bootstrap.",
        ),
        click.option("--group", "groups", multiple=True, metavar="GROUP", help="A group to join. May be repeated."),
        click.option("--ungroup", multiple=True, metavar="GROUP", help="A group to leave. May be repeated."),
        click.option(
            "--tag",
            "tags",
            multiple=True,
            metavar="KEY[=VALUE]",
            help="A tag; it replaces a tag with the same key. May be repeated.",
        ),
        click.option("--untag", multiple=True, metavar="KEY", help="A tag to remove. May be repeated."),
    ),
)


@click.command("set", cls=SectionedCommand)
@selector_argument()
@_login_options
@_place_options
@profiles_option
@inventory_option
@json_option
def set_(
    selector: str,
    login: LoginChange,
    place: PlaceChange,
    profiles_dir: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Change the devices of SELECTOR in the inventory. The devices themselves do not change.

    To pin a new host key, give --repin and agree to the key; scripts pass --fingerprint.

    \b
    Examples:
      edgert device set kitchen --address pi@10.0.0.9
      edgert device set kitchen --repin                     # the device was reinstalled
      edgert device set site:plant-1 --jump ops@bastion
      edgert device set all --tag firmware=7 --ungroup canary
    """
    devices = inventory.select(selector)
    login.check(selector, devices)
    changes = {**place.fields(profiles_dir), **login.fields(devices[0])}
    # Another command may have changed the devices meanwhile, so apply the changes to the file's present content.
    changed = inventory.change(
        [device.name for device in devices], lambda device: place.listed(replace(device, **changes))
    )
    names = ", ".join(device.name for device in changed)
    text = f"changed in {inventory.path}: {names}" if changed else "nothing to change"
    emit({"changed": [device.as_json() for device in changed], "inventory": str(inventory.path)}, text, as_json)
    _print_next_steps({device.name: device for device in devices}, changed)


def _print_next_steps(before: Mapping[str, Device], changed: Sequence[Device]) -> None:
    """Print the commands that apply the changes to the devices."""
    moved = [new.name for new in changed if new.site != before[new.name].site]
    due = [new.name for new in changed if new.name in moved or new.profile != before[new.name].profile]
    if due:
        progress(f"next: edgert bootstrap {','.join(due)} configures the devices")
    if tagged := [new.name for new in changed if new.tags != before[new.name].tags and new.name not in due]:
        progress(f"next: edgert bootstrap {','.join(tagged)}, if these devices follow a channel, which selects by tags")
    for name in moved:
        site = before[name].site
        # Without the empty --store, the command would also remove the former site's history from a project's store.
        forget = f"edgert fleet forget {name} --site {site} --store ''"
        progress(f"then: {forget} clears the messages that the broker retains for its former site")


def _key(tag: str) -> str:
    return tag.partition("=")[0]
