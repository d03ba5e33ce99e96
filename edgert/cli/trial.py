"""`edgertd trial`."""

from __future__ import annotations

import time
from typing import Any

import click

from edgert.checks.status import ask_daemon
from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option
from edgert.cli.quantity import Duration
from edgert.cli.slot_commands import store_of
from edgert.errors import DaemonUnreachable, EdgeRTError, RolledBack
from edgert.state_dir import StateDir
from edgert.typed_json import to_json
from edgert.versions.claims import under_claim
from edgert.versions.slot_store import SlotStore

POLL_S = 0.2
UNDER_WAY = ("loading", "watching", "filling")


@click.command()
@click.argument("model")
@click.option("--wait", is_flag=True, help="Wait for the end of the trial.")
@click.option("--for", "for_s", type=Duration(), help="Wait for the end, at most so long: 30s, 10m.")
@click.option("--digest", default="", help="The digest of the version [default: the live one].")
@claim_option
@json_option
@click.pass_obj
def trial(state: StateDir, model: str, wait: bool, for_s: float | None, digest: str, token: str, as_json: bool) -> None:
    """Show the trial of MODEL: what was measured, how long it is still watched, or how it ended.

    Exits with 9 if the version was rolled back, and prints the reason. If no daemon runs, this command ends a trial
    that ran out or whose watch was cut off.

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
        while answer["state"] in UNDER_WAY and (until is None or time.monotonic() < until):
            time.sleep(POLL_S)
            answer = trial_of(state, store, digest or answer["digest"])
    if answer["state"] == "rolled-back":
        raise RolledBack(f"release {answer['release']} of {model} was rolled back: {answer['reason']}")
    emit(answer, _text(model, answer), as_json)


def trial_of(state: StateDir, store: SlotStore, digest: str) -> dict[str, Any]:
    """Return the state of the trial of the version `digest` ("": the live one).

    If it is over and no daemon runs, this function ends it. `state` is `loading`, `watching`, `filling` (golden samples
    are sent), `held` (all limits held, the host decides), `open` (it has no limits), `kept`, `rolled-back` (with the
    `reason`), or `none` (this device knows no trial of the version).
    """
    # The daemon first, as the slots decide: an outcome between the two must not look like no trial at all.
    measured = _measured(state, store.folder.name)
    slots = store.read()
    live, rolled_back = slots.live, slots.rolled_back
    passed = (slots.limits is not None and slots.limits.passed) or (live is not None and live.good)
    if passed and measured is not None and measured.get("phase") != "held":  # the last figures came between the two
        measured = _measured(state, store.folder.name) or measured
    if live is not None and digest in ("", live.digest):
        value = {"model": store.folder.name, "release": live.release, "digest": live.digest}
        watch = {} if measured and measured.get("release") != live.release else measured
        if watch is None and slots.on_trial and store.expire_trial(unwatched=True):
            return trial_of(state, store, live.digest)
        watch = watch or {}
        if not slots.on_trial:
            return {**value, **watch, "state": "kept" if live.good else "none"}
        left_s = 0.0 if slots.trial is None else slots.trial.left_s(store.clock)
        value["trial_left_s"] = round(left_s, 1)
        if slots.limits is None:
            return {**value, "state": "open"}
        value["trial_limits"] = vars(slots.limits)
        if slots.limits.passed:
            return {**value, **watch, "state": "held"}
        phase = watch.get("phase", "watching" if slots.limits.started else "loading")  # a busy daemon may not answer
        # The slots do not hold the daemon's outcome yet: it waits for the lock or the disk, and then notes it.
        return {**value, **watch, "state": phase if phase in UNDER_WAY else "watching"}
    if rolled_back is not None and digest in ("", rolled_back.digest):
        return {"model": store.folder.name, **vars(rolled_back), "state": "rolled-back"}
    return {"model": store.folder.name, "release": None, "digest": digest, "state": "none"}


def _measured(state: StateDir, model: str) -> dict[str, Any] | None:
    """Return what the daemon measured during a trial: {} if nothing, None if no daemon runs."""
    try:
        serving = ask_daemon(state.control_socket).models.get(model)
    except DaemonUnreachable:
        return None
    except EdgeRTError:  # the daemon is busy
        return {}
    return {} if serving is None or serving.trial is None else dict(to_json(serving.trial))


def _text(model: str, answer: dict[str, Any]) -> str:
    texts = {
        "loading": "is not watched yet",
        "open": f"is on trial without limits for {answer.get('trial_left_s', 0):.0f} s more",
        "held": "kept all limits; mark it good with: edgertd mark-good " + model,
        "kept": "is good",
        "none": "has no trial",
    }
    release = f"release {answer['release']} of {model}" if answer["release"] is not None else model
    if answer["state"] in texts:
        return ": ".join(filter(None, [f"{release} {texts[answer['state']]}", _told(answer)]))
    if "text" not in answer:
        return f"{release} is watched; the daemon is too busy to report figures"
    return f"{release} is watched for {answer['left_s']:.0f} s more: {answer['text']}"


def _told(answer: dict[str, Any]) -> str:
    return "; ".join(filter(None, (answer.get("text"), answer.get("doubt"))))
