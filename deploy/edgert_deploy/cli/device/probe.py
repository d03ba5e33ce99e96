"""`edgert device probe`: the facts of a machine, and the profile that fits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from edgert.cli.output import json_option, progress
from edgert.errors import ConfigInvalid
from edgert.printable import counted
from edgert_deploy.cli.device.host_keys import identity_path, pinned
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.options import inventory_option, profiles_option
from edgert_deploy.cli.shared.types import FILE, Selector
from edgert_deploy.devices.facts import LOCAL_PROFILE, MachineFacts, local_facts, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import DeviceProfile, list_profiles, own_profiles
from edgert_deploy.devices.selector import SELECTED_BY
from edgert_deploy.devices.transports import Transport


@dataclass(frozen=True)
class _Misses:
    """The reasons why a profile does not fit a machine."""

    profile: str
    misses: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A machine's facts, and the profile that fits it, else the `reason` why no profile was chosen.

    `profiles` has the misses of every profile.
    """

    facts: MachineFacts
    profile: str | None
    reason: str
    in_inventory: str | None
    profiles: tuple[_Misses, ...]


@click.command("probe")
@click.argument("selector", type=Selector(), metavar="SELECTOR|ADDRESS")
@click.option("--save", is_flag=True, help="Record the fitting profiles in the inventory.")
@click.option("--fingerprint", "wanted", metavar="SHA256:...", help="The host key to accept, for an ADDRESS.")
@click.option("--identity", type=FILE, help="Private SSH key, for an ADDRESS.")
@click.option("--jump", default="", metavar="[USER@]HOST[:PORT]", help="A jump host to an ADDRESS.")
@click.option("--jump-fingerprint", metavar="SHA256:...", help="The jump host's key to accept.")
@profiles_option
@inventory_option
@json_option
def probe_(
    selector: str,
    save: bool,
    wanted: str | None,
    identity: Path | None,
    jump: str,
    jump_fingerprint: str | None,
    profiles_dir: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Show the facts and the fitting profile of devices in the inventory, or of the machine at ADDRESS.

    The command installs nothing, and changes the inventory only with --save. An ADDRESS contains `@`, `.` or `[`. The
    exit code is the code of the first device that cannot be reached, else 4 if a device has no fitting profile or
    several.

    \b
    Examples:
      edgert device probe pi@10.0.0.7 --fingerprint SHA256:abc...
      edgert device probe site:plant-1 --json
      edgert device probe all --save
    """
    is_address = not selector.startswith(SELECTED_BY) and any(sign in selector for sign in "@.[")
    if not is_address and (wanted or identity or jump or jump_fingerprint):
        raise click.UsageError(
            f"--fingerprint, --identity and --jump need an ADDRESS, and {selector!r} is a SELECTOR: for a machine outside the "
            f"inventory, give USER@{selector}"
        )
    if is_address and save:
        raise click.UsageError("--save needs a device of the inventory; add this one with: edgert device add")
    if is_address:
        draft = Device(selector, "ssh", selector, "", "/", home="/", identity=identity_path(identity), jump=jump)
        devices = [pinned(draft, wanted, jump_fingerprint)]  # a device that is not in the inventory
    else:
        devices = inventory.select(selector)
    profiles, own = list_profiles(profiles_dir), own_profiles(profiles_dir)
    results = run_on_each(devices, lambda device, transport: _ask(device, transport, profiles, own))
    changed = {
        name: found.profile
        for name, found in results.good
        if found.profile is not None and found.profile != found.in_inventory
    }
    saved = []
    if save:
        after = inventory.change(list(changed), lambda device: replace(device, profile=changed[device.name]))
        saved = [device.name for device in after]
    elif changed and not is_address:
        progress(f"next: edgert device probe {','.join(changed)} --save records these profiles")
    unfit = any(found.profile is None for _, found in results.good)
    text = "\n".join(_text(name, found) for name, found in results.good)
    results.show(text, as_json, code=ConfigInvalid.exit_code if unfit else 0, saved=saved)


def _ask(device: Device, transport: Transport, profiles: list[DeviceProfile], own: frozenset[str]) -> _Found:
    local = not device.kind.needs_runtime
    facts = probe(transport, device.name, device.python)
    facts = local_facts(facts) if local else facts
    misses = {p.name: tuple(misfits(p, facts).values()) for p in profiles if local or p.name != LOCAL_PROFILE}
    profile, reason = None, ""
    try:
        profile = pick_profile(profiles, facts, local=local, own=own).name
    except ConfigInvalid as error:
        fitting = [name for name, reasons in misses.items() if not reasons]
        several = f"several profiles fit: {', '.join(fitting)}; choose one with --profile of edgert device add or set"
        reason = error.message if not misses else several if fitting else "none fits"
    profiles_missed = tuple(_Misses(name, reasons) for name, reasons in misses.items())
    return _Found(facts, profile, reason, device.profile or None, profiles_missed)


def _text(name: str, found: _Found) -> str:
    facts = found.facts
    python = f"Python {facts.python} ({facts.python_path})" if facts.python else "no Python 3.10 or newer"
    engines = ", ".join(f"{name} {release}" for name, release in sorted(facts.engines.items()))
    other = found.in_inventory not in (None, found.profile)
    recorded = f"; the inventory has {found.in_inventory}" if other else ""
    misses = [
        f"    {each.profile} {', '.join(each.misses) or 'matches less well'}"
        for each in found.profiles
        if each.misses or found.profile not in (None, each.profile)
    ]
    return "\n".join(
        [
            f"{name}: {facts.model or 'an unnamed machine'}",
            f"  system       {facts.machine}, {facts.distribution or 'an unknown distribution'}, glibc {facts.glibc or 'none'}, "
            f"{python}, {'systemd' if facts.systemd else 'no systemd'}" + (f", L4T {facts.l4t}" if facts.l4t else ""),
            f"  processor    {facts.cpu or 'unnamed'}, {counted(facts.cpus, 'core')}; accelerators: {', '.join(facts.accelerators) or 'none seen'}",
            f"  memory, disk {facts.memory_mb} MB, {facts.disk_free_mb} MB free",
            f"  engines      {engines or 'none'}",
            f"  profile      {found.profile or found.reason}{recorded}",
            *(["  other profiles:", *misses] if misses else []),
        ]
    )
