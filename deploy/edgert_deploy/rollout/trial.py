"""The host's side of a trial with limits: the device decides, and the host asks for the state.

A lost link changes nothing on the device. The host asks again until the end of the trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgert.checks.trial_status import TrialAnswer, TrialState
from edgert.durations import duration_text
from edgert.errors import DaemonBusy, DeviceUnreachable, Interrupted, RolledBack
from edgert.typed_json import OMITTED
from edgert.versions.trial_limits import Readings
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.claims import HeldClaim
from edgert_deploy.devices.remote_daemon import answer_of
from edgert_deploy.devices.transports import LineSink
from edgert_deploy.rollout.plan import Plan, Step

SLICE_S = 5.0  # the time that one request waits on the device; Ctrl-C takes effect between two requests
RETRY_S = 2.0
REQUEST_S_MAX = 60.0
REPORT_SHARE = 0.25  # the host prints a line of progress after each such share of the time of the watch
GRACE_S = 60.0  # the time after the end of the trial in which a slow device may report its decision


@dataclass(frozen=True)
class Watched:
    """A trial in which all limits held, with the readings if the device still has them."""

    state: TrialState
    readings: Readings | None = field(default=None, metadata={OMITTED: True})
    text: str | None = field(default=None, metadata={OMITTED: True})
    doubt: str | None = field(default=None, metadata={OMITTED: True})


def watch_trial(
    claim: HeldClaim, plan: Plan, stop: UserStop, progress: LineSink, clock: Callable[[], float] = time.monotonic
) -> Watched:
    """Wait for the device's decision on its trial; return the readings if all limits held.

    Raises RolledBack if the version broke a limit, DeviceUnreachable if the device does not answer at the end of the
    trial, DaemonBusy if the device has not decided GRACE_S after that end, DeviceError for an answer that cannot be
    read, and Interrupted if the user stops.
    """
    limits, name = plan.limits, claim.daemon.device.name
    assert limits is not None  # without limits, the plan has no WATCH step
    progress(f"watched: {limits.described()}")
    until = clock() + limits.trial_s + limits.confirm_s
    report_at_s = limits.watch_s * (1 - REPORT_SHARE)
    while True:
        if stop.asked:
            raise Interrupted(f"interrupted in the middle of {Step.WATCH.value}")
        try:
            command = ("trial", plan.model, "--digest", plan.digest, "--for", duration_text(SLICE_S))
            answer = answer_of(TrialAnswer, claim.call(*command, timeout_s=SLICE_S + REQUEST_S_MAX))
        except DeviceUnreachable as error:
            if clock() >= until:
                raise
            progress(f"{error.message}; the trial continues on the device; trying again")
            time.sleep(RETRY_S)
            continue
        watch = answer.watch
        if answer.state in (TrialState.HELD, TrialState.KEPT):
            progress(f"all limits held: {watch.text if watch else ''}")
            if watch and watch.doubt:
                progress(f"warning: {watch.doubt}")
            return Watched(answer.state, watch.readings, watch.text, watch.doubt) if watch else Watched(answer.state)
        if not answer.state.under_way:
            raise RolledBack(
                f"{name}: release {plan.release} of {plan.model} is no longer on trial. See the live release with: edgert status {name}"
            )
        if clock() >= until + GRACE_S:
            raise DaemonBusy(
                f"{name} has not decided on release {plan.release} of {plan.model} by the end of its trial. Its daemon may "
                f"hang: run edgert logs {name}, then edgert doctor {name}"
            )
        left_s = watch.left_s if watch else limits.watch_s
        if left_s <= report_at_s:
            report_at_s -= limits.watch_s * REPORT_SHARE
            progress(f"{left_s:.0f} s left: {watch.text if watch else ''}")
