"""Drift compares the releases that rollouts want with the device's report, and names each difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgert import __version__
from edgert.checks.channel_status import ChannelStatus, WantedRelease
from edgert.checks.status import DaemonState, ModelStatus, ServingStatus
from edgert.typed_json import to_json
from edgert.versions.slots import BY_COMMAND, RolledBackVersion, Version
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.drift import Wanted, device_drifts, model_drifts, wanted_by_rollouts
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from tests.support.rollouts import ROLLOUT
from tests.support.statuses import LOADED, device_status

WANTED = {"m": Wanted(7, "seven", "m-r7")}
GOOD = Version(7, "seven", good=True)
READY = ServingStatus("ready", loaded=LOADED)
DEGRADED = replace(LOADED, degraded=True, tried=("tensorrt: no GPU",))


def a_rollout(
    release: int,
    *devices: str,
    state: RolloutState = RolloutState.DONE,
    took: tuple[str, ...] = (),
    refused: bool = False,
    **other: Any,
) -> Rollout:
    result = Result.REFUSED if refused else Result.LIVE
    outcomes = {device: Outcome(device, result) for device in took or devices}
    given = {"id": f"m-r{release}", "digest": f"d{release}", "model": "m", "inventory": "/i", **other}
    return replace(ROLLOUT, **given, release=release, devices=devices, state=state, outcomes=outcomes)


def test_the_wanted_release_comes_from_the_newest_rollout_that_names_the_device() -> None:
    rollouts = [
        a_rollout(10, "a", "b", "c", refused=True),
        a_rollout(9, "a", "b", state=RolloutState.ABORTED, took=("a",)),
        a_rollout(8, "b", state=RolloutState.STOPPED, took=("x",)),
        a_rollout(8, "a", "c", inventory="/other"),
        a_rollout(7, "a", "b", "c"),
        a_rollout(3, "a", model="n"),
    ]
    found = wanted_by_rollouts(rollouts, "/i")
    assert {device: {model: one.release for model, one in models.items()} for device, models in found.items()} == {
        "a": {"m": 9, "n": 3},
        "b": {"m": 8},  # the rollout stopped before this device, but its release is still wanted
        "c": {"m": 7},
    }


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"live": Version(6, "six", good=True)}, ["behind"]),
        ({"live": Version(8, "eight", good=True)}, ["ahead"]),
        ({"live": Version(7, "other", good=True)}, ["other-digest"]),
        ({"live": None, "state": "empty", "serving": None}, ["missing"]),
        ({"state": "trial"}, ["trial"]),
        (
            {
                "live": Version(6, "six", good=True),
                "rolled_back": RolledBackVersion(7, "seven", "p99_ms is 9 ms", 0.0),
            },
            ["rolled-back"],
        ),
        ({"serving": ServingStatus("degraded", loaded=DEGRADED)}, ["degraded"]),
        ({"serving": ServingStatus("quarantined", fault="it crashed")}, ["not-serving"]),
    ],
)
def test_each_difference_has_its_own_kind(changes: dict[str, Any], kinds: list[str]) -> None:
    model = replace(ModelStatus("m", "steady", GOOD, None, serving=READY), **changes)
    (found,) = model_drifts(device_status(model), WANTED)
    assert [one.kind for one in found.drift] == kinds
    if kinds == ["rolled-back"]:
        assert found.drift[0].text == "release 7 was rolled back: p99_ms is 9 ms"
    (unasked,) = model_drifts(device_status(replace(model, serving=READY)), {})
    assert unasked.drift == () or unasked.drift[0].kind == "trial", "what no rollout says is no drift"


def test_a_release_that_a_command_rolled_back_is_reported_once() -> None:
    back = RolledBackVersion(7, "seven", BY_COMMAND, 0.0)
    model = ModelStatus("m", "steady", Version(6, "six", good=True), None, rolled_back=back, serving=READY)
    (found,) = model_drifts(device_status(model), WANTED)
    assert [one.text for one in found.drift] == ["release 7 was rolled back by a command"]


def test_the_release_of_a_devices_channel_replaces_the_release_of_a_rollout() -> None:
    model = ModelStatus("m", "steady", GOOD, None, serving=READY)
    channel = ChannelStatus(
        "oci://r/x", "stable", wanted={"m": WantedRelease(8, "eight"), "n": WantedRelease(2, "two")}
    )
    (first, second) = model_drifts(device_status(model, channel=channel), WANTED)
    assert first.wanted == Wanted(8, "eight", channel="stable")
    assert first.drift[0].text == "release 7 is live, but release 8 is wanted (channel stable)"
    assert (second.model, second.drift[0].kind) == ("n", "missing")
    assert to_json(first)["wanted"] == {"release": 8, "digest": "eight", "rollout": "", "channel": "stable"}


def test_a_missing_model_and_a_stopped_daemon_are_drift() -> None:
    (found,) = model_drifts(device_status(), WANTED)
    assert (found.live, [one.kind for one in found.drift]) == (None, ["missing"])
    assert device_drifts(device_status(edgert=__version__)) == ()
    drifts = device_drifts(device_status(daemon=DaemonState(False), edgert="0.0.1"), "0.2.0")
    assert [one.kind for one in drifts] == ["stopped", "runtime"]
    assert drifts[1].text == "its edgert is 0.0.1, older than this host's 0.2.0"


def test_other_code_of_the_same_version_is_drift() -> None:
    status = device_status(edgert="0.2.0", code="a")
    assert device_drifts(status, "0.2.0", "a") == ()
    (drift,) = device_drifts(status, "0.2.0", "b")
    assert (drift.kind, drift.text) == ("runtime", "its edgert 0.2.0 has other code than this host's 0.2.0")
    assert device_drifts(replace(status, code=""), "0.2.0", "b") == (), "the device does not state it"
