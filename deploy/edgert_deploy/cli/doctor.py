"""`edgert doctor`: find what is missing or wrong on this host and on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from edgert.cli.output import emit, json_option
from edgert.errors import ConfigInvalid
from edgert.printable import counted
from edgert_deploy.cli.shared.options import inventory_option, profiles_option, selector_argument
from edgert_deploy.cli.shared.output import say
from edgert_deploy.common.parallel import UserStop, for_each
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.selector import ALL
from edgert_deploy.doctor import FAIL, HOST, OK, WARN, Finding


@click.command()
@selector_argument(required=False)
@click.option("--host", "host_only", is_flag=True, help="Check this host only.")
@click.option("-q", "--quiet", is_flag=True, help="Omit findings that are ok.")
@profiles_option
@inventory_option
@json_option
def doctor(
    selector: str | None, host_only: bool, quiet: bool, profiles_dir: Path | None, inventory: Inventory, as_json: bool
) -> None:
    """Find what is missing or wrong on this host and on devices.

    Each finding is ok, warn or fail; a finding that is not ok names the next step. The command changes nothing. If a
    device does not answer, the command continues with the other devices. Without SELECTOR, the command checks the
    devices of the project's `selector`, else all devices.

    The exit code is 0 if nothing failed, else the code of the first failure: 4 this host, 6 unreachable or another host
    key, 7 a device.

    \b
    Examples:
      edgert doctor
      edgert doctor kitchen --quiet
      edgert doctor site:plant-1 --json
    """
    from edgert_deploy.doctor.device import check_device
    from edgert_deploy.doctor.host import check_host, signing_keys

    if host_only and _is_typed():
        raise click.UsageError("SELECTOR and --host exclude each other: choose one")
    findings = check_host(inventory)
    devices = [] if host_only else _devices(inventory, selector, findings)
    keys = signing_keys()
    if devices:
        say("", f"checking {counted(len(devices), 'device')}")
        for of_device in for_each(devices, lambda device: check_device(device, keys, profiles_dir), UserStop()):
            findings += of_device or []
    failed = [finding for finding in findings if finding.level == FAIL]
    shown = [finding for finding in findings if not quiet or finding.level != OK]
    value = {"ok": not failed, "findings": [_as_json(finding) for finding in shown]}
    emit(value, _table(shown, findings), as_json)
    click.get_current_context().exit(failed[0].exit_code if failed else 0)


def _is_typed() -> bool:
    """Return whether the user gave SELECTOR; otherwise SELECTOR is the project's."""
    return click.get_current_context().get_parameter_source("selector") is ParameterSource.COMMANDLINE


def _devices(inventory: Inventory, selector: str | None, findings: list[Finding]) -> list[Device]:
    """Return the devices to check; an invalid selector of the project becomes a finding.

    Raises ConfigInvalid for a SELECTOR that the user gave.
    """
    try:
        known = inventory.devices()
    except ConfigInvalid:
        return []  # a finding about the host already names the error in the inventory
    if not known and not _is_typed():
        return []
    try:
        return inventory.select(ALL if selector is None else selector)
    except ConfigInvalid as error:
        if _is_typed():
            raise
        next_step = "repair `selector` in the project's edgert.toml"
        findings.append(Finding(HOST, "selector", FAIL, error.message, next_step, error.exit_code))
        return []


def _as_json(finding: Finding) -> dict[str, str]:
    value = asdict(finding)
    del value["exit_code"]
    value["next"] = value.pop("next_step")
    return value


def _table(shown: Sequence[Finding], findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and the next step below each finding that is not ok."""
    width = max((len(finding.where) for finding in shown), default=0)
    check_width = max((len(finding.check) for finding in shown), default=0)
    lines = []
    for finding in shown:
        begin = f"{finding.where:{width}}  {finding.check:{check_width}}  {finding.level:4}  "
        lines.append(begin + finding.text)
        if finding.next_step:
            lines.append(f"{'':{len(begin)}}next: {finding.next_step}")
    count = {level: sum(finding.level == level for finding in findings) for level in (OK, WARN, FAIL)}
    return "\n".join([*lines, f"{count[OK]} ok, {count[WARN]} warn, {count[FAIL]} fail"])
