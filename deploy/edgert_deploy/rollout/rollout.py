"""A rollout deploys one bundle to many devices, wave by wave, and records its progress on disk.

`roll_out` does the remaining work of a new or interrupted rollout. If the host died during a deployment, the device has
decided alone at the end of its trial. `roll_out` then deploys to this device again. The new plan has only the missing
steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgert.printable import counted
from edgert_deploy.common.parallel import AT_ONCE_DEFAULT, for_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.rollout.deployment import Outcome, Result, abandoned, deploy_one
from edgert_deploy.rollout.request import DeployRequest
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore

PAUSE_STEP_S = 0.2  # a stop ends the pause between two waves after at most this time

Progress = Callable[[str, str], None]  # (device name, or "" for the rollout itself; a line)


def roll_out(
    store: RolloutStore,
    rollout: Rollout,
    request: DeployRequest,
    devices: Sequence[Device],
    progress: Progress,
    sleep: Callable[[float], None] = time.sleep,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Rollout:
    """Do the remaining work of `rollout` and record it; return the rollout at its end.

    The limit of failures ignores the failures of earlier attempts. Several threads call `progress` (with a device's
    name and a line) and `on_outcome`.
    """
    journal = _Journal(store, replace(rollout, state=RolloutState.RUNNING, reason=""))
    waves = rollout.strategy.split(len(devices))

    def note(outcome: Outcome) -> None:
        journal.add(outcome)
        on_outcome(outcome)

    for number, wave in enumerate(waves, start=1):
        todo = [devices[i] for i in wave if not journal.rollout.has_release(devices[i].name)]
        if not todo:
            continue
        if len(waves) > 1:
            progress("", f"wave {number} of {len(waves)}: {counted(len(todo), 'device')}")
        journal.begin(len(todo))
        deploy_each(
            request,
            todo,
            progress,
            at_once=rollout.strategy.parallel,
            # After a stop, each deployment begins, and reports the stop itself.
            may_begin=lambda: request.stop.asked or not journal.too_many_failed(),
            on_outcome=note,
        )
        if request.stop.asked:
            return journal.end(RolloutState.STOPPED, "stopped by the user")
        if journal.too_many_failed():
            return journal.end(RolloutState.STOPPED, journal.failure_text())
        if number < len(waves) and rollout.strategy.pause_s and journal.rollout.left:
            journal.end(RolloutState.PAUSED, f"after wave {number} of {len(waves)}")
            progress("", f"waiting {rollout.strategy.pause_s:g} s before the next wave; Ctrl-C stops here")
            until = time.monotonic() + rollout.strategy.pause_s
            while time.monotonic() < until and not request.stop.asked:
                sleep(PAUSE_STEP_S)
            if request.stop.asked:
                return journal.end(RolloutState.STOPPED, f"stopped by the user after wave {number}")
            journal.end(RolloutState.RUNNING, "")
    left = len(journal.rollout.left)
    return journal.end(RolloutState.DONE, f"{counted(left, 'device')} without the release" if left else "")


def deploy_each(
    request: DeployRequest,
    devices: Sequence[Device],
    progress: Progress,
    *,
    at_once: int = AT_ONCE_DEFAULT,
    may_begin: Callable[[], bool] = lambda: True,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Deploy to each device; return the outcomes in the order of `devices`.

    The other devices do not wait for a device that does not answer. A device for which `may_begin` returns False is
    skipped. Several threads call the functions in the arguments.
    """

    def work(device: Device) -> Outcome:
        if not may_begin():
            return Outcome(device.name, Result.NOT_BEGUN)
        outcome = deploy_one(request, device, lambda line: progress(device.name, line))
        on_outcome(outcome)
        return outcome

    outcomes = []
    for device, outcome in zip(devices, for_each(devices, work, request.stop, at_once), strict=True):
        if outcome is None:
            outcome = abandoned(request, device)
            on_outcome(outcome)
        outcomes.append(outcome)
    return outcomes


class _Journal:
    """The running rollout and its record. Any thread may call `add` and `too_many_failed`."""

    def __init__(self, store: RolloutStore, rollout: Rollout) -> None:
        self._store = store
        self.rollout = rollout
        self._begun = self._failed = 0
        self._lock = threading.Lock()
        store.write(rollout)

    def begin(self, count: int) -> None:
        """Count the devices of a wave that starts."""
        self._begun += count

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self._failed += outcome.error is not None
            self._write(outcomes={**self.rollout.outcomes, outcome.device: outcome})

    def too_many_failed(self) -> bool:
        return self.rollout.strategy.too_many_failed(self._failed, self._begun)

    def failure_text(self) -> str:
        limit = self.rollout.strategy.max_failures
        return f"{self._failed} of {counted(self._begun, 'device')} failed, more than --max-failures {limit}"

    def end(self, state: RolloutState, reason: str) -> Rollout:
        with self._lock:
            return self._write(state=state, reason=reason)

    def _write(self, **changes: object) -> Rollout:
        self.rollout = replace(self.rollout, **changes)  # type: ignore[arg-type]  # fields of Rollout, given by name
        self._store.write(self.rollout)
        return self.rollout
