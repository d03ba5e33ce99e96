"""Prints rollouts and their plans: a row for each device, totals for a large fleet, or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from edgert.printable import counted, some_of
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.output import NAMES_MAX, columns, error_lines, errors_by_cause
from edgert_deploy.common.quantities import size_text
from edgert_deploy.rollout.deployment import Outcome
from edgert_deploy.rollout.request import DeployRequest
from edgert_deploy.rollout.rollout_record import Rollout

ROWS_MAX = 40  # with more devices, the output has totals of the results and groups of errors


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout": {
            "id": rollout.id,
            "state": rollout.state.value,
            "reason": rollout.reason,
            "left": rollout.left,
            "by": rollout.by,
        },
        "bundle": {"model": rollout.model, "release": rollout.release, "digest": rollout.digest},
        "devices": [to_json(rollout.outcome(name)) for name in rollout.devices],
    }


def rollout_table(rollout: Rollout, *, every: bool = True) -> str:
    """Return a row for each device, the errors, and the rollout's progress.

    Without `every`, the rows are results with the number of their devices, and errors of one cause share a line.
    """
    outcomes = [rollout.outcome(name) for name in rollout.devices]
    named = zip(rollout.devices, rollout.errors, strict=True)
    errors = [(name, error.code, error.message) for name, error in named if error is not None]
    if every:
        rows = [("DEVICE", "RESULT", "LIVE", "SECONDS")]
        for outcome in outcomes:
            live = "" if outcome.serving is None else f"{rollout.model} {outcome.serving}"
            rows.append((outcome.device, outcome.result.value, live, f"{outcome.seconds:.1f}"))
        lines = f"{columns(rows)}\n{error_lines(errors)}"
    else:
        counts = Counter(outcome.result.value for outcome in outcomes)
        totals = [("RESULT", "DEVICES"), *((result, str(count)) for result, count in counts.most_common())]
        lines = f"{columns(totals)}\n{errors_by_cause(errors)}"
        lines += f"every device: edgert rollout status {rollout.id}\n"
    lines += _warning_lines(outcomes)
    done = len(rollout.devices) - len(rollout.left)
    lines += f"{rollout.model} release {rollout.release}: {done} of {counted(len(rollout.devices), 'device')}"
    if rollout.left and len(rollout.devices) > 1:
        lines += f"; {rollout.state.value}" + (f": {rollout.reason}" if rollout.reason else "")
        lines += _next_steps(rollout)
    if any(outcome.warning for outcome in outcomes):
        lines += (
            f"\nnext: edgert bundle diff shows the differences; edgert rollback {rollout.model} DEVICE rolls it back"
        )
    return lines


def _warning_lines(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each warning, with its devices."""
    devices: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.warning:
            devices.setdefault(outcome.warning, []).append(outcome.device)
    return "".join(f"warning: {text}: {some_of(names, NAMES_MAX)}\n" for text, names in devices.items())


def _next_steps(rollout: Rollout) -> str:
    """Return the useful commands. A rollback on a device without the release would undo an earlier change."""
    steps = [f"edgert rollout resume {rollout.id}", f"edgert rollout abort {rollout.id}"] if rollout.resumable else []
    if 0 < len(rollout.changed) <= ROWS_MAX:
        steps.append(f"edgert rollback {rollout.model} {','.join(rollout.changed)}")
    return f"\nnext: {', or '.join(steps)}" if steps else ""


def plan_json(request: DeployRequest, outcomes: Sequence[Outcome], waves: list[list[str]]) -> dict[str, Any]:
    manifest = request.offer.manifest
    return {
        "bundle": {"model": manifest.model, "release": manifest.release, "digest": request.offer.digest},
        "devices": to_json(outcomes),
        "waves": waves,
    }


def plan_table(request: DeployRequest, outcomes: Sequence[Outcome], waves: list[list[str]]) -> str:
    """Return a row for each device, the errors, and the trial limits."""
    wave_of = {name: str(number) for number, names in enumerate(waves, start=1) for name in names}
    rows = [("DEVICE", "WAVE", "RESULT", "TO SEND", "STEPS")]
    for outcome in outcomes:
        size = "" if outcome.error is not None else size_text(outcome.sent_bytes)
        steps = " ".join(step.value for step in outcome.steps)
        rows.append((outcome.device, wave_of[outcome.device], outcome.result.value, size, steps))
    errors = [(o.device, o.error.code, o.error.message) for o in outcomes if o.error is not None]
    devices, manifest = counted(len(outcomes), "device"), request.offer.manifest
    planned = f"{len(outcomes) - len(errors)} of {devices}"
    notes = error_lines(errors) + _warning_lines(outcomes)
    text = f"{columns(rows)}\n{notes}{manifest.model} release {manifest.release}: {planned}"
    if request.limits is not None:
        text += f"\non trial: {request.limits.described()}"
    return text
