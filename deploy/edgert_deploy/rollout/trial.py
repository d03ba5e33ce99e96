"""Waiting for what a device makes of a trial with limits: the device judges, the host only asks how it stands.

A link that falls meanwhile changes nothing there; it is tried again for as long as the trial may last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from edgert.errors import DaemonBusy, DeviceUnreachable, Interrupted, RolledBack
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.common.parallel import Stop
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.rollout.plan import Plan, Step

SLICE_S = 5.0  # one question waits so long over there; a Ctrl-C here is heard between two of them
RETRY_S = 2.0
QUESTION_S_MAX = 60.0
SAID_EVERY = 0.25  # of the watch
GRACE_S = 60.0  # beyond the end of the trial, in which a device that is slow says what became of it

Say = Callable[[str], None]


def wait_for_trial(
    daemon: RemoteDaemon,
    plan: Plan,
    limits: TrialLimits,
    under: tuple[str, str],
    stop: Stop,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """What the device measured, once all limits held. Raises RolledBack with the reason where one did not,
    DeviceUnreachable where it could not be asked for as long as the trial lasts, DaemonBusy where it has not decided even
    then, and Interrupted."""
    say(f"watched: {limits.described()}")
    until = clock() + limits.trial_s + limits.confirm_s
    say_at_s = limits.watch_s * (1 - SAID_EVERY)
    words = ("trial", plan.model, "--digest", plan.digest, "--wait-s", f"{SLICE_S:g}", *under)
    while True:
        if stop.asked:
            raise Interrupted(f"interrupted in the middle of {Step.WATCH.value}")
        try:
            found = daemon.call(*words, timeout_s=SLICE_S + QUESTION_S_MAX)
        except DeviceUnreachable as error:
            if clock() >= until:
                raise
            say(f"{error.message}; the device goes on by itself, asking again")
            time.sleep(RETRY_S)
            continue
        state = str(found.get("state"))
        if state in ("held", "kept"):
            say(f"all limits held: {found.get('text', '')}")
            return {key: found[key] for key in ("state", "readings", "text") if key in found}
        if state not in ("loading", "watching", "filling"):
            raise RolledBack(f"{daemon.device.name}: release {plan.release} of {plan.model} is not on trial any more")
        if clock() >= until + GRACE_S:
            raise DaemonBusy(
                f"{daemon.device.name} has not judged release {plan.release} of {plan.model} by the end of its trial: its "
                f"daemon may hang; look with: edgert logs {daemon.device.name}, then edgert doctor {daemon.device.name}"
            )
        left_s = float(found.get("left_s", limits.watch_s))
        if left_s <= say_at_s:
            say_at_s -= limits.watch_s * SAID_EVERY
            say(f"{left_s:.0f} s more: {found.get('text', '')}")
