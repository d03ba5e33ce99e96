"""`edgert bootstrap`: install software, keys, configuration and service on bare devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from edgert.cli.output import json_option
from edgert.engines import FOR_TESTS
from edgert.telemetry.broker_connection import CONNECTED
from edgert_deploy.bootstrap.bootstrap import BootstrapResult, use_previous_runtime
from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
from edgert_deploy.bootstrap.plan import BootstrapOptions, plan_bootstrap
from edgert_deploy.cli.shared.bootstrap_options import (
    ChannelOptions,
    DaemonOptions,
    ReportOptions,
    RuntimeOptions,
    channel_options,
    daemon_options,
    report_options,
    runtime_options,
)
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import inventory_option, profiles_option, same_machine_option, selector_argument
from edgert_deploy.cli.shared.output import say
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.same_machine import refuse_same_machine, select_to_change
from edgert_deploy.devices.transports import Transport


@click.command(cls=SectionedCommand)
@selector_argument()
@runtime_options
@daemon_options
@report_options
@channel_options
@click.option("--dry-run", is_flag=True, help="Show the present state, the data to send and the steps; change nothing.")
@same_machine_option
@profiles_option
@inventory_option
@json_option
def bootstrap(
    selector: str,
    runtime: RuntimeOptions,
    daemon: DaemonOptions,
    reports: ReportOptions,
    follow: ChannelOptions,
    dry_run: bool,
    same_machine: bool,
    profiles_dir: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Set up bare devices: Python environment, edgert, engines, key, configuration, service.

    The devices need no internet: all files come from this host. A repeated bootstrap changes only the parts that
    differ. A bootstrap replaces another version of edgert only with --upgrade.

    A device first tests a new runtime beside the old runtime, then puts the new runtime on trial. On trial, the new
    runtime must serve all models that the old runtime served, with the right answers. Otherwise the device restores the
    old runtime. The command upgrades one device first; if this upgrade fails, the other devices do not change. Without
    SELECTOR, the command sets up the devices of the project's `selector`.

    \b
    Examples:
      edgert bootstrap kitchen --dry-run
      edgert bootstrap kitchen
      edgert bootstrap kitchen --with text
      edgert bootstrap all --upgrade --trial 5m
      edgert bootstrap kitchen --previous-runtime
      edgert bootstrap kitchen --set serving.window_s=10 --set serving.cache_mb=0
      edgert bootstrap all --broker 10.0.0.1:8883 --mqtt-ca ca.pem --mqtt-username edge --mqtt-password-file pw
      edgert bootstrap all --follow oci://registry.example.org/plant/models --channel stable --registry-login login.json
    """
    runtime.check()
    devices = select_to_change(inventory, selector)
    if not same_machine:
        refuse_same_machine(devices, inventory.devices())
    options = BootstrapOptions(
        broker=reports.broker_of_devices(),
        following=follow.following(),
        settings=daemon.checked_settings(),
        keys=daemon.trusted_keys(),
        service=daemon.service,
        engines=runtime.engines,
        extras=runtime.extras,
        unlocked=runtime.unlocked,
        upgrade=runtime.upgrade,
        trial_s=runtime.trial_s,
    )

    def plan(device: Device, transport: Transport) -> dict[str, Any]:
        profile = load_profile(device.profile, profiles_dir)
        return plan_bootstrap(device, profile, options, transport, partial(say, device.name)).to_json()

    def do(device: Device, transport: Transport) -> BootstrapResult:
        tell = partial(say, device.name)
        if runtime.previous_runtime:
            return use_previous_runtime(device, options, transport, tell)
        return set_up(device, load_profile(device.profile, profiles_dir), options, transport, tell)

    if dry_run:
        plans = run_on_each(devices, plan)
        lines = [f"{name}: {step}" for name, planned in plans.good for step in planned["steps"] or ["nothing to do"]]
        plans.show("\n".join(lines), as_json, dry_run=True)
        return
    results = run_on_each(devices, do, one_first=runtime.upgrade or runtime.previous_runtime)
    pythons = {device.name: device.python for device in devices}
    lines = [_line(result, pythons[name]) for name, result in results.good]
    results.show("\n".join(lines), as_json)


def _line(result: BootstrapResult, python: str) -> str:
    status = result.status
    changed = ", ".join(result.changed) or "nothing, all parts were present"
    engines = ", ".join(
        f"{name} {version}" for name, version in status.engines.items() if version and name not in FOR_TESTS
    )
    engines += "".join(f"; without {name}" for name in result.lacking)
    telemetry = status.telemetry
    lines = [
        f"{result.device}: ready, kept running by {result.service}; engines {engines}; changed: {changed}",
        f"  apps on the device use {python} and the socket {status.socket}",
    ]
    if telemetry.broker and telemetry.connection.state != CONNECTED:
        lines[0] = lines[0].replace(": ready,", ": ready except for its broker,", 1)
        lines.append(f"  broker: {telemetry.connection.text or f'no connection to {telemetry.broker} yet'}")
    return "\n".join(lines)
