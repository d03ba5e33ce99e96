"""`edgert device probe`: what a machine is, and which profile fits it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from edgert.cli.output import json_option
from edgert.errors import ConfigInvalid
from edgert.printable import counted
from edgert_deploy.cli.device.host_keys import identity_path, pinned
from edgert_deploy.cli.shared.each import Row, run_on_each
from edgert_deploy.cli.shared.options import inventory_option, profiles_option
from edgert_deploy.cli.shared.output import say
from edgert_deploy.cli.shared.types import FILE, Selector
from edgert_deploy.devices.facts import LOCAL_PROFILE, MachineFacts, local_facts, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import DeviceProfile, list_profiles
from edgert_deploy.devices.selector import SELECTED_BY
from edgert_deploy.devices.transports import Transport


@click.command("probe")
@click.argument("selector", type=Selector(), metavar="SELECTOR|ADDRESS")
@click.option("--save", is_flag=True, help="Record the profiles found in the inventory.")
@click.option("--fingerprint", "wanted", metavar="SHA256:...", help="The host key to accept, for an ADDRESS.")
@click.option("--identity", type=FILE, help="Private SSH key, for an ADDRESS.")
@click.option("--jump", default="", metavar="[USER@]HOST[:PORT]", help="A jump host to reach an ADDRESS through.")
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
    """Show what machines are, and which profile fits: devices of the inventory, or the one at ADDRESS.

    Nothing is installed, and the inventory stays as it is unless you pass --save. An ADDRESS contains `@`, `.` or `[`.
    Exits with the code of the first device that could not be asked, with 4 if no profile fits a device.

    \b
    Examples:
      edgert device probe pi@10.0.0.7 --fingerprint SHA256:abc...
      edgert device probe site:plant-1 --json
      edgert device probe all --save
    """
    is_address = not selector.startswith(SELECTED_BY) and any(sign in selector for sign in "@.[")
    if is_address and save:
        raise click.UsageError("--save needs a device of the inventory; add this one with: edgert device add")
    if is_address:
        draft = Device(selector, "ssh", selector, "", "/", home="/", identity=identity_path(identity), jump=jump)
        devices = [pinned(draft, wanted, jump_fingerprint)]  # in no inventory: for this one time
    else:
        devices = inventory.select(selector)
    profiles = list_profiles(profiles_dir)
    results = run_on_each(devices, lambda device, transport: _ask(device, transport, profiles))
    rows = results.good
    changed = {row["device"]: row["profile"] for row in rows if row["profile"] not in (None, row["in_inventory"])}
    saved = []
    if save:
        after = inventory.change(list(changed), lambda device: replace(device, profile=changed[device.name]))
        saved = [device.name for device in after]
    elif changed and not is_address:
        say("", f"next: edgert device probe {','.join(changed)} --save records these profiles")
    unfit = any(row["profile"] is None for row in rows)
    text = "\n".join(_text(row) for row in rows)
    results.show(text, as_json, code=ConfigInvalid.exit_code if unfit else 0, saved=saved)


def _ask(device: Device, transport: Transport, profiles: list[DeviceProfile]) -> Row:
    """Return the machine's facts, the profile that fits (or None and why), and why others do not."""
    local = not device.kind.needs_runtime
    facts = probe(transport, device.name, device.python)
    facts = local_facts(facts) if local else facts
    misses = {p.name: list(misfits(p, facts).values()) for p in profiles if local or p.name != LOCAL_PROFILE}
    profile, reason = None, ""
    try:
        profile = pick_profile(profiles, facts, local=local).name
    except ConfigInvalid as error:
        fitting = [name for name, reasons in misses.items() if not reasons]
        several = f"several fit: {', '.join(fitting)}; choose one with --profile"
        reason = error.message if not misses else several if fitting else "none fits"
    return {
        "facts": asdict(facts),
        "profile": profile,
        "reason": reason,
        "in_inventory": device.profile or None,
        "profiles": [{"profile": name, "misses": reasons} for name, reasons in misses.items()],
    }


def _text(row: Row) -> str:
    facts = MachineFacts(**row["facts"])
    python = f"Python {facts.python} ({facts.python_path})" if facts.python else "no Python 3.10 or newer"
    engines = ", ".join(f"{name} {release}" for name, release in sorted(facts.engines.items()))
    other = row["in_inventory"] not in (None, row["profile"])
    recorded = f"; the inventory has {row['in_inventory']}" if other else ""
    misses = [
        f"    {profile['profile']} {', '.join(profile['misses'])}" for profile in row["profiles"] if profile["misses"]
    ]
    return "\n".join(
        [
            f"{row['device']}: {facts.model or 'an unnamed machine'}",
            f"  system       {facts.machine}, {facts.distribution or 'an unknown distribution'}, glibc {facts.glibc or 'none'}, "
            f"{python}, {'systemd' if facts.systemd else 'no systemd'}" + (f", L4T {facts.l4t}" if facts.l4t else ""),
            f"  processor    {facts.cpu or 'unnamed'}, {counted(facts.cpus, 'core')}; accelerators: {', '.join(facts.accelerators) or 'none seen'}",
            f"  memory, disk {facts.memory_mb} MB, {facts.disk_free_mb} MB free",
            f"  engines      {engines or 'none'}",
            f"  profile      {row['profile'] or row['reason']}{recorded}",
            *(["  not for it:", *misses] if misses else []),
        ]
    )
