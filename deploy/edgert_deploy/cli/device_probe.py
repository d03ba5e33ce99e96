"""`edgert device probe`: what a machine is, and which profile is for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option
from edgert_deploy.cli.host_keys import DEVICE_KEY, JUMP_KEY, absolute, agreed_host_key
from edgert_deploy.common.parallel import AT_ONCE_MAX
from edgert_deploy.devices.facts import LOCAL_PROFILE, MachineFacts, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import SELECTED_BY, Device, Inventory, SshAddress, find_inventory
from edgert_deploy.devices.profiles import DeviceProfile, list_profiles
from edgert_deploy.devices.transports import open_transport


@dataclass(frozen=True)
class Probed:
    """What a machine said, the profile that is for it ("" with the `reason`), and what each of the others misses."""

    device: Device
    facts: MachineFacts
    profile: str
    reason: str
    misses: dict[str, list[str]]


@click.command("probe")
@click.argument("target", metavar="SELECTOR|ADDRESS")
@click.option("--save", is_flag=True, help="Record the profiles that were found in the inventory.")
@click.option("--fingerprint", "wanted", metavar="SHA256:...", help="The host key to accept, for an ADDRESS.")
@click.option("--identity", type=click.Path(dir_okay=False, path_type=Path), help="Private SSH key, for an ADDRESS.")
@click.option("--jump", default="", metavar="[USER@]HOST[:PORT]", help="A machine that an ADDRESS is reached through.")
@click.option("--jump-fingerprint", metavar="SHA256:...", help="The jump host's key to accept.")
@click.option("--devices", "devices_dir", type=click.Path(path_type=Path), help="Folder with device profiles.")
@inventory_option
@json_option
def probe_(
    target: str,
    save: bool,
    wanted: str | None,
    identity: Path | None,
    jump: str,
    jump_fingerprint: str | None,
    devices_dir: Path | None,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Ask devices of the inventory, or the machine at ADDRESS, what they are, and say which profile is for them.

    Nothing is installed there, and the inventory stays as it is unless you say --save. An ADDRESS has a `@`, a `.` or
    a `[` in it. Exits with the code of the first device that could not be asked, 4 where no profile fits one.

    \b
    Examples:
      edgert device probe pi@10.0.0.7 --fingerprint SHA256:abc...
      edgert device probe site:plant-1 --json
      edgert device probe all --save
    """
    inventory = find_inventory(inventory_file)
    is_address = not target.startswith(SELECTED_BY) and any(sign in target for sign in "@.[")
    if is_address:
        if save:
            raise click.UsageError("--save is for devices of the inventory; add this one with: edgert device add")
        devices = [_unnamed(target, wanted, identity, jump, jump_fingerprint)]
    else:
        devices = inventory.select(target)
    profiles = list_profiles(devices_dir)
    with ThreadPoolExecutor(max_workers=AT_ONCE_MAX) as pool:
        answers = list(pool.map(lambda device: _ask(device, profiles), devices))
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    found = [answer for answer in answers if isinstance(answer, Probed)]
    saved = _save(inventory, found) if save else []
    if errors and len(devices) == 1:
        raise errors[0]
    rows = [_as_json(device, answer) for device, answer in zip(devices, answers, strict=True)]
    value = {"ok": not errors, "devices": rows, "saved": saved}
    emit(value, "\n".join(_text(d, a) for d, a in zip(devices, answers, strict=True)), as_json)
    if (
        not save
        and not is_address
        and (changed := [p.device.name for p in found if p.profile not in ("", p.device.profile)])
    ):
        click.echo(f"next: edgert device probe {','.join(changed)} --save records what was found", err=True)
    unfit = [one for one in found if not one.profile]
    code = errors[0].exit_code if errors else ConfigInvalid.exit_code if unfit else 0
    click.get_current_context().exit(code)


def _unnamed(address: str, wanted: str | None, identity: Path | None, jump: str, jump_wanted: str | None) -> Device:
    """A machine that is in no inventory, its host key agreed to for this once."""
    device = Device(address, "ssh", address, "", "/", home="/", identity=absolute(identity), jump=jump)
    if jump:
        device = replace(device, jump_host_key=agreed_host_key(SshAddress.parse(jump), jump_wanted, JUMP_KEY))
    return replace(device, host_key=agreed_host_key(SshAddress.parse(address), wanted, DEVICE_KEY, device))


def _ask(device: Device, profiles: list[DeviceProfile]) -> Probed | EdgeRTError:
    local = not device.kind.needs_runtime
    transport = open_transport(device)
    try:
        facts = probe(transport, device.name, device.python)
    except EdgeRTError as error:
        return error
    finally:
        transport.close()
    misses = {p.name: misfits(p, facts) for p in profiles if local or p.name != LOCAL_PROFILE}
    try:
        return Probed(device, facts, pick_profile(profiles, facts, local=local).name, "", misses)
    except ConfigInvalid as error:
        fitting = [name for name, reasons in misses.items() if not reasons]
        reason = f"several fit: {', '.join(fitting)}; say which with --profile" if fitting else "none fits"
        return Probed(device, facts, "", reason if misses else error.message, misses)


def _save(inventory: Inventory, found: list[Probed]) -> list[str]:
    profiles = {p.device.name: p.profile for p in found if p.profile not in ("", p.device.profile)}
    changed = inventory.change(list(profiles), lambda device: replace(device, profile=profiles[device.name]))
    return [device.name for device in changed]


def _as_json(device: Device, answer: Probed | EdgeRTError) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return {
        "device": device.name,
        "facts": asdict(answer.facts),
        "profile": answer.profile or None,
        "reason": answer.reason,
        "in_inventory": device.profile or None,
        "profiles": [{"profile": name, "misses": reasons} for name, reasons in answer.misses.items()],
    }


def _text(device: Device, answer: Probed | EdgeRTError) -> str:
    if isinstance(answer, EdgeRTError):
        return f"{device.name}: failed [{answer.code}]: {answer.message}"
    facts = answer.facts
    python = f"Python {facts.python} ({facts.python_path})" if facts.python else "no Python from 3.10 up"
    engines = ", ".join(f"{name} {release}" for name, release in sorted(facts.engines.items()))
    recorded = "" if device.profile in ("", answer.profile) else f"; the inventory has {device.profile}"
    misses = [f"  {name} {', '.join(reasons)}" for name, reasons in answer.misses.items() if reasons]
    return "\n".join(
        [
            f"{device.name}: {facts.model or 'a machine that does not say what it is'}",
            f"  system       {facts.machine}, {facts.distribution or 'an unknown distribution'}, glibc {facts.glibc or 'none'}, "
            f"{python}, {'systemd' if facts.systemd else 'no systemd'}" + (f", L4T {facts.l4t}" if facts.l4t else ""),
            f"  processor    {facts.cpu or 'of no name'}, {facts.cpus} cores; accelerators: {', '.join(facts.accelerators) or 'none seen'}",
            f"  memory, disk {facts.memory_mb} MB, {facts.disk_free_mb} MB free",
            f"  engines      {engines or 'none'}",
            f"  profile      {answer.profile or answer.reason}{recorded}",
            *(["  not for it:", *(f"  {line}" for line in misses)] if misses else []),
        ]
    )
