"""`edgertd trial`."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from edgert.checks.status import ask_daemon
from edgert.checks.trial_status import TrialAnswer, TrialPhase, TrialState, TrialStatus
from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option
from edgert.cli.quantity import Duration
from edgert.cli.slot_commands import store_of
from edgert.errors import DaemonUnreachable, EdgeRTError, RolledBack
from edgert.state_dir import StateDir
from edgert.typed_json import to_json
from edgert.versions.claims import under_claim
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots, Version

POLL_S = 0.2


@click.command()
@click.argument("model")
@click.option("--wait", is_flag=True, help="Wait for the end of the trial.")
@click.option("--for", "for_s", type=Duration(), help="Wait for the end, at most this long: 30s, 10m.")
@click.option("--digest", default="", help="The digest of the version [default: the live one].")
@claim_option
@json_option
@click.pass_obj
def trial(state: StateDir, model: str, wait: bool, for_s: float | None, digest: str, token: str, as_json: bool) -> None:
    """Show the trial of MODEL: the measurements, the time that is left, or the outcome.

    If the version was rolled back, the command prints the reason, and the exit code is 9. If no daemon runs, this
    command ends a trial whose time has passed or whose watch was interrupted.

    \b
    Examples:
      edgertd trial digits
      edgertd trial digits --wait --json
      edgertd trial digits --for 10m
    """
    store = store_of(state, model)
    until = None if wait and for_s is None else time.monotonic() + (for_s or 0.0)
    with under_claim(state, token):
        answer = trial_of(state, store, digest)
        while answer.state.under_way and (until is None or time.monotonic() < until):
            time.sleep(POLL_S)
            answer = trial_of(state, store, digest or answer.digest)
    emit(to_json(answer), _text(answer), as_json)


def trial_of(state: StateDir, store: SlotStore, digest: str) -> TrialAnswer:
    """Return the state of the trial of the version `digest` ("": the live version). Raises RolledBack.

    If the time of the trial has passed and no daemon runs, this function ends the trial.
    """
    model = store.folder.name
    # Read the daemon first, then the slots. In the other order, a trial that ends between the two readings would seem
    # to be missing.
    daemon_runs, watch = _measured(state, model)
    slots = store.read()
    live, rolled_back = slots.live, slots.rolled_back
    passed = (slots.limits is not None and slots.limits.passed) or (live is not None and live.good)
    if passed and daemon_runs and (watch is None or watch.phase is not TrialPhase.HELD):
        watch = _measured(state, model)[1] or watch  # newer figures, if there are any
    if live is not None and digest in ("", live.digest):
        if not daemon_runs and slots.on_trial and store.expire_trial(unwatched=True):
            return trial_of(state, store, live.digest)
        # A kept version has not broken a limit: the figures are those of an earlier trial of the same release.
        earlier = watch is not None and watch.phase is TrialPhase.BROKEN and not slots.on_trial
        if earlier or (watch is not None and watch.release != live.release):
            watch = None
        answer = TrialAnswer(model, _state_of(slots, live, watch), live.release, live.digest, watch=watch)
        if not slots.on_trial:
            return answer
        left_s = 0.0 if slots.trial is None else slots.trial.left_s(store.clock)
        answer = replace(answer, trial_left_s=round(left_s, 1), trial_limits=slots.limits)
        return replace(answer, watch=None) if answer.state is TrialState.OPEN else answer
    if rolled_back is not None and digest in ("", rolled_back.digest):
        raise RolledBack(f"release {rolled_back.release} of {model} was rolled back: {rolled_back.reason}")
    return TrialAnswer(model, TrialState.NONE, None, digest)


def _state_of(slots: Slots, live: Version, watch: TrialStatus | None) -> TrialState:
    if not slots.on_trial:
        return TrialState.KEPT if live.good else TrialState.NONE
    if slots.limits is None:
        return TrialState.OPEN
    if slots.limits.passed:
        return TrialState.HELD
    if watch is None:  # a busy daemon may not answer
        return TrialState.WATCHING if slots.limits.started else TrialState.LOADING
    # The slots lack the daemon's outcome: the daemon waits for the lock or the disk before it writes the outcome.
    return TrialState.FILLING if watch.phase is TrialPhase.FILLING else TrialState.WATCHING


def _measured(state: StateDir, model: str) -> tuple[bool, TrialStatus | None]:
    """Return whether a daemon runs, and its measurements of the trial if it answers."""
    try:
        serving = ask_daemon(state.control_socket).models.get(model)
    except DaemonUnreachable:
        return False, None
    except EdgeRTError:  # the daemon is busy
        return True, None
    return True, None if serving is None else serving.trial


def _text(answer: TrialAnswer) -> str:
    watch, model = answer.watch, answer.model
    texts = {
        TrialState.LOADING: "is not watched yet",
        TrialState.OPEN: f"is on trial without limits for {answer.trial_left_s or 0:.0f} s more",
        TrialState.HELD: "stayed within all limits; mark it good with: edgertd mark-good " + model,
        TrialState.KEPT: "was marked good",
        TrialState.NONE: "has no trial",
    }
    version = f"release {answer.release} of {model}" if answer.release is not None else model
    if answer.state in texts:
        told = "; ".join(filter(None, (watch.text, watch.doubt))) if watch else ""
        return ": ".join(filter(None, (f"{version} {texts[answer.state]}", told)))
    if watch is None:
        return f"{version} is watched; the daemon is too busy to report figures"
    return f"{version} is watched for {watch.left_s:.0f} s more: {watch.text}"
