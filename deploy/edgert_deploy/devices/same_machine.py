"""Two devices of the inventory that are one machine, and what commands do about them.

`edgert device add` and `edgert bootstrap` refuse one machine with two names, unless the user states that it is intended
(`--same-machine`). Commands that change several devices refuse one machine with two names and one state folder in any
case: they would change it twice at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import Device, Inventory


def select_to_change(inventory: Inventory, selector: str) -> list[Device]:
    """Return the devices that `selector` matches, for a command that changes them.

    Raises ConfigInvalid, also if two of the devices have one state folder on one machine.
    """
    devices = inventory.select(selector)
    refuse_same_state(devices)
    return devices


def refuse_same_machine(chosen: Iterable[Device], known: Iterable[Device]) -> None:
    """Raise ConfigInvalid if two devices are one machine, and neither has `same_machine`.

    The function compares devices of `chosen` with devices of `known`: by host key, or by folder if they are local.
    """
    by_key: dict[str, list[Device]] = {}
    for device in known:
        by_key.setdefault(_machine(device), []).append(device)
    for device in chosen:
        for other in by_key.get(_machine(device), ()) if _machine(device) else ():
            if other.name == device.name or device.same_machine or other.same_machine:
                continue
            if not device.host_key:
                raise ConfigInvalid(
                    f"{device.name} has the folder of {other.name}, {device.address}: give another folder, or use one name"
                )
            raise ConfigInvalid(
                f"{device.name} has the host key of {other.name}. If they are one machine, a bootstrap of one would take over "
                "the other: use one name, and remove the other (edgert device remove), or allow both with --same-machine. If "
                "they are two machines with a copied disk, give one a new host key"
            )


def refuse_same_state(devices: Iterable[Device]) -> None:
    """Raise ConfigInvalid if two devices have one state folder on one machine.

    Devices with `same_machine` and different addresses may be machines with a copied disk. Their claims, which are on
    the device, prevent simultaneous changes.
    """
    seen: dict[tuple[str, str], Device] = {}
    for device in devices:
        for machine in (f"{device.transport} {device.address}", "" if device.same_machine else _machine(device)):
            other = seen.setdefault((machine, device.state), device) if machine else device
            if other is not device:
                raise ConfigInvalid(
                    f"{other.name} and {device.name} are one device: the same machine and the same state folder, "
                    f"{device.state}. Nothing was changed. Remove one name with edgert device remove, or select only one"
                )


def _machine(device: Device) -> str:
    """Return the identity of the machine: its host key, or the folder of a local device; "" if unknown."""
    return device.host_key or ("" if device.kind.uses_ssh else device.address)
