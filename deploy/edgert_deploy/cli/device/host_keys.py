"""Let the user confirm host keys, or compare them with the fingerprints that a script passes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from edgert.cli.output import progress
from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import Device, SshAddress, fingerprint

DEVICE_KEY = "--fingerprint"
JUMP_KEY = "--jump-fingerprint"


def pinned(device: Device, wanted: str | None, jump_wanted: str | None) -> Device:
    """Return `device` with its host key and the key of its jump host, both confirmed by `agreed_host_key`."""
    if device.jump:
        jump_key = agreed_host_key(device.jump, jump_wanted, JUMP_KEY)
        device = replace(device, jump_host_key=jump_key)
    return replace(device, host_key=agreed_host_key(device.address, wanted, DEVICE_KEY, device))


def agreed_host_key(address: str, wanted: str | None, option: str, behind: Device | None = None) -> str:
    """Return the host key that `address` shows, once the user or the fingerprint `wanted` confirms it.

    Raises DeviceUnreachable and HostKeyMismatch; also ConfigInvalid if nobody confirmed the key.

    Args:
        wanted: The expected fingerprint; None to ask the user.
        option: The name of the option for `wanted`, for messages.
        behind: The device at `address`, to use its jump host; None if `address` is a jump host itself.
    """
    from edgert_deploy.devices.transports.ssh_login import Jump, scan_host_key

    parsed = SshAddress.parse(address)
    key = scan_host_key(parsed, wanted, jump=Jump.of(behind) if behind is not None else None)
    shown = f"{parsed.host} shows host key {fingerprint(key)} ({key.split()[0]})"
    progress(shown)
    if wanted is not None:
        return key
    progress(
        "compare this key with the key on the machine's own console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    )
    if not sys.stdin.isatty():
        raise ConfigInvalid(
            f"{shown}; not a terminal, so nobody can confirm the key: check the key, then pass {option}"
        )
    what = "the jump host's" if option == JUMP_KEY else "this device's"
    if not click.confirm(f"Is it {what}?", default=False, err=True):
        raise ConfigInvalid(
            "you did not agree to the host key: nothing was recorded. If another machine has this address, give the right "
            f"one; else check the key, then run this again or pass {option}"
        )
    return key


def identity_path(file: Path | None) -> str:
    """Return a private key's path for the inventory; "" for None. Raises ConfigInvalid for a missing file."""
    if file is None:
        return ""
    if not file.expanduser().is_file():
        raise ConfigInvalid(f"identity {file} is missing: give the private key's path")
    return str(file.expanduser().absolute())
