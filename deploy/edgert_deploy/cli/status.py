"""`edgert status`: the live releases on devices, and their drift from the wanted releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from edgert.checks.status import DeviceStatus
from edgert.cli.output import json_option
from edgert.environment import CODE, code_digest
from edgert.errors import DeviceUnreachable, EdgeRTError, HostKeyMismatch, LoginRefused, NotBootstrapped, RuntimeBroken
from edgert.printable import some_of
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import NAMES_MAX, columns
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.selector import ALL
from edgert_deploy.devices.transports import Transport
from edgert_deploy.rollout.drift import Drift, ModelDrift, device_drifts, model_drifts, wanted_by_rollouts
from edgert_deploy.rollout.rollout_record import Rollout

EXIT_DRIFT = 12
# The kinds of drift of a device without the wanted release.
LACKS_RELEASE = frozenset(("behind", "missing", "rolled-back"))
HEADING = ("DEVICE", "PROFILE", "DAEMON", "MODEL", "LIVE", "WANTED", "STATE", "ENGINE", "DRIFT")
# The column DRIFT shows these words if a device gave no status. The error is below the table.
_NO_STATUS = {
    NotBootstrapped.code: "not bootstrapped",
    RuntimeBroken.code: "runtime broken",
    **dict.fromkeys((DeviceUnreachable.code, LoginRefused.code, HostKeyMismatch.code), "unreachable"),
}


@dataclass(frozen=True)
class _DeviceReport:
    """A device's status and drift. `drift` is about the device itself, and `models` is about its models."""

    drifts: bool
    drift: tuple[Drift, ...]
    models: tuple[ModelDrift, ...]
    status: DeviceStatus


@click.command()
@selector_argument(ALL)
@click.option("--check", is_flag=True, help=f"Exit with code {EXIT_DRIFT} if a device drifts.")
@inventory_option
@json_option
def status(selector: str, check: bool, inventory: Inventory, as_json: bool) -> None:
    """Show the releases that devices serve, and mark drift from the wanted releases.

    If the device follows a channel, the channel states the wanted release, and WANTED also shows the channel's name.
    Otherwise the wanted release is the release of the project's newest rollout to this device. Without SELECTOR, the
    command uses the project's `selector`, else all devices.

    \b
    Drift means one of these:
      - a release that is behind or ahead, or has other content; a missing or damaged model
      - a running trial, or a rollback (with the reason)
      - a degraded engine, a model that does not serve, a daemon that does not run
      - another version or other code of edgert than this host's

    The exit code is the code of the first device that cannot be reached or gives no status.

    \b
    Examples:
      edgert status
      edgert status canary --json
      edgert status all --check
    """
    rollouts = open_rollouts().all()
    wanted, code = wanted_by_rollouts(rollouts, find_project().name_of(inventory.path)), code_digest(CODE)

    def ask(device: Device, transport: Transport) -> _DeviceReport:
        status = RemoteDaemon(transport, device).status()
        models, device_drift = model_drifts(status, wanted.get(device.name, {})), device_drifts(status, own_code=code)
        return _DeviceReport(bool(device_drift) or any(model.drift for model in models), device_drift, models, status)

    results = run_on_each(inventory.select(selector), ask)
    drifts = bool(results.failed) or any(report.drifts for _, report in results.good)
    results.show(
        columns([HEADING, *(cells for name, answer in results.answers for cells in _cells(name, answer))]),
        as_json,
        below="\n".join([*_reasons(results.good), *_doubts(results.good), *_next_steps(results.good, rollouts)]),
        code=EXIT_DRIFT if check and drifts else 0,
        raise_lone=False,
        failed_also={"drifts": True},
        drifts=drifts,
    )


def _reasons(good: list[tuple[str, _DeviceReport]]) -> list[str]:
    """Return a line for each reason of drift, with the first devices that it applies to."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, report in good:
        reasons = [("", drift.text) for drift in report.drift]
        reasons += [(f" {model.model}", drift.text) for model in report.models for drift in model.drift]
        for reason in reasons:
            names.setdefault(reason, []).append(name)
    return [f"{some_of(devices, NAMES_MAX)}{model}: {text}" for (model, text), devices in names.items()]


def _doubts(good: list[tuple[str, _DeviceReport]]) -> list[str]:
    """Return a line for each live version whose trial compared only few answers."""
    lines = []
    for name, report in good:
        for model in report.status.models:
            trial = None if model.serving is None else model.serving.trial
            if trial and trial.doubt and trial.release == model.release:
                lines.append(f"{name} {model.model}: release {trial.release} held its limits, but {trial.doubt}")
    return lines


def _next_steps(good: list[tuple[str, _DeviceReport]], rollouts: Sequence[Rollout]) -> list[str]:
    """Return the next steps for devices that lack a daemon, a model or the wanted release.

    Five cases have a next step: the daemon is stopped; the device has no model at all; its rollout was interrupted; the
    wanted release is missing; the device rolled the wanted release back.
    """
    stopped = [name for name, report in good if not report.status.daemon.running]
    bare = [name for name, report in good if not report.models]
    lines = []
    if stopped:
        shown = some_of(stopped, NAMES_MAX)
        lines.append(f"next: the daemon does not run on {shown}: edgert bootstrap {','.join(stopped)} starts it")
    if bare:
        lines.append(f"next: nothing was deployed to {some_of(bare, NAMES_MAX)}: edgert deploy BUNDLE {','.join(bare)}")
    by_id = {rollout.id: rollout for rollout in rollouts}
    unfinished: dict[str, list[str]] = {}
    rolled_back: dict[tuple[str, int | None, str], list[str]] = {}
    missing: dict[tuple[str, int], list[str]] = {}
    for name, report in good:
        for model in report.models:
            kinds = {drift.kind for drift in model.drift}
            if model.wanted is None or not kinds & LACKS_RELEASE:
                continue
            rollout = by_id.get(model.wanted.rollout)
            if rollout is not None and rollout.interrupted(name, "rolled-back" in kinds):
                unfinished.setdefault(rollout.id, []).append(name)
            elif "rolled-back" in kinds:
                rolled_back.setdefault((model.model, model.live, model.wanted.channel), []).append(name)
            elif "missing" in kinds and rollout is not None and not report.status.models:
                missing.setdefault((model.model, rollout.release), []).append(name)
    lines += [
        f"next: release {release} of {model} is wanted on {some_of(devices, NAMES_MAX)}, and no model is there, as on a new machine: "
        f"edgert deploy BUNDLE {','.join(devices)}"
        for (model, release), devices in missing.items()
    ]
    lines += [
        f"next: rollout {rollout_id} was interrupted on {some_of(devices, NAMES_MAX)}: "
        f"edgert rollout resume {rollout_id} continues it, edgert rollout abort {rollout_id} ends it"
        for rollout_id, devices in unfinished.items()
    ]
    return lines + [_after_roll_back(*about, names) for about, names in rolled_back.items()]


def _after_roll_back(model: str, live: int | None, channel: str, devices: Sequence[str]) -> str:
    """Return the next step after a rollback of the wanted release."""
    how = f"edgert publish BUNDLE --channel {channel}" if channel else f"edgert deploy BUNDLE {','.join(devices)}"
    keep = "" if live is None or channel else f"; or deploy the bundle of release {live} again to keep release {live}"
    return f"next: deploy a fixed release of {model} to {some_of(devices, NAMES_MAX)}: {how}{keep}"


def _cells(name: str, answer: _DeviceReport | EdgeRTError) -> list[tuple[str, ...]]:
    if isinstance(answer, EdgeRTError):
        return [(name, "-", "not known", "-", "-", "-", "-", "-", _NO_STATUS.get(answer.code, "no answer"))]
    status = answer.status
    daemon = "runs" if status.daemon.running else "does not run"
    device_kinds = [drift.kind for drift in answer.drift]
    lines: list[tuple[str, ...]] = []
    for model in answer.models:
        there = status.model(model.model)
        live = "nothing" if model.live is None else f"release {model.live}"
        live = "not known" if there and there.damaged else live
        by = model.wanted
        channel = f" ({by.channel})" if by and by.channel else ""
        wanted = f"{by.release}{channel}" if by else "-"
        state = there.state if there else "-"
        engine = there.serving.loaded.engine if there and there.serving and there.serving.loaded else "-"
        drift = ", ".join([*device_kinds, *(drift.kind for drift in model.drift)]) or "-"
        lines.append((name, status.profile, daemon, model.model, live, wanted, state, engine, drift))
    return lines or [(name, status.profile, daemon, "none", "-", "-", "-", "-", ", ".join(device_kinds) or "-")]
