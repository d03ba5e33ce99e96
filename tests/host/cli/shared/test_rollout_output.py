"""A rollout is printed as rows, or as totals for a large fleet, with the useful next commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import DeviceUnreachable, EdgeRTError, ErrorText, RolledBack
from edgert.typed_json import to_json
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.cli.shared.rollout_output import ROWS_MAX, plan_json, plan_table, rollout_json, rollout_table
from edgert_deploy.devices.transports import open_transport
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.plan import Step
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from tests.support.bundles import make_null_bundle
from tests.support.rollouts import ROLLOUT

GONE = DeviceUnreachable("b: cannot connect: timed out")


def ended(*outcomes: Outcome, state: RolloutState = RolloutState.STOPPED, **more: Any) -> Rollout:
    """Return a rollout to a, b and c with these outcomes."""
    by_device = {outcome.device: outcome for outcome in outcomes}
    return replace(ROLLOUT, state=state, outcomes=by_device, **more)


def live(device: str, **more: Any) -> Outcome:
    return Outcome(device, Result.LIVE, serving=2, seconds=1.26, **more)


def failed(device: str, error: EdgeRTError = GONE) -> Outcome:
    return Outcome(device, Result.FAILED, error=ErrorText.of(error))


def a_fleet(size: int) -> tuple[str, ...]:
    return tuple(f"d{number:04}" for number in range(size))


# --- rollouts


def test_each_device_has_a_row_and_each_error_has_a_line() -> None:
    shown = rollout_table(ended(live("a"), failed("b"), reason="1 of 3 devices failed"))
    assert shown.splitlines() == [
        "DEVICE  RESULT     LIVE    SECONDS",
        "a       live       echo 2  1.3",
        "b       failed             0.0",
        "c       not-begun          0.0",
        "b [device.unreachable]: cannot connect: timed out",
        "echo release 2: 1 of 3 devices; stopped: 1 of 3 devices failed",
        "next: edgert rollout resume echo-r2-1, or edgert rollout abort echo-r2-1, or edgert rollback echo a",
    ]


def test_after_a_rollout_that_is_done_no_next_step_is_shown() -> None:
    done = ended(live("a"), Outcome("b", Result.UNCHANGED, serving=2), live("c"), state=RolloutState.DONE)
    assert rollout_table(done).splitlines()[-1] == "echo release 2: 3 of 3 devices"


@pytest.mark.parametrize(
    ("rollout", "steps"),
    [
        (ended(failed("a"), failed("b"), failed("c")), "edgert rollout resume echo-r2-1, or edgert rollout abort echo-r2-1"),
        (ended(live("a"), state=RolloutState.ABORTED), "edgert rollback echo a"),
        (ended(state=RolloutState.ABORTED), ""),
        (ended(*(Outcome(name, Result.REFUSED, error=ErrorText.of(GONE)) for name in "abc")), ""),
        (ended(live("a"), *(Outcome(name, Result.REFUSED, error=ErrorText.of(GONE)) for name in "bc")), "edgert rollback echo a"),
    ],
)  # fmt: skip
def test_only_commands_that_help_are_shown_as_next_steps(rollout: Rollout, steps: str) -> None:
    _, _, said = rollout_table(rollout).partition("\nnext: ")
    assert said == steps


def test_many_devices_are_not_named_in_a_command() -> None:
    names = a_fleet(ROWS_MAX + 2)
    some = ended(*(live(name) for name in names[:ROWS_MAX]), devices=names)
    assert f"edgert rollback echo {','.join(names[:ROWS_MAX])}" in rollout_table(some)
    more = ended(*(live(name) for name in names[: ROWS_MAX + 1]), devices=names)
    assert "edgert rollback" not in rollout_table(more)


def test_the_output_for_a_single_device_has_no_state_of_a_rollout() -> None:
    shown = rollout_table(ended(failed("b"), devices=("b",), reason="1 of 1 devices failed"))
    assert shown.splitlines()[-1] == "echo release 2: 0 of 1 device"


def test_a_large_fleet_is_counted_and_failures_of_one_cause_share_a_line() -> None:
    names = a_fleet(1000)
    outcomes = [
        failed(name, DeviceUnreachable(f"{name}: off")) if i % 4 == 0 else live(name) for i, name in enumerate(names)
    ]
    lines = rollout_table(ended(*outcomes, devices=names), every=False).splitlines()
    assert [line.split() for line in lines[:3]] == [["RESULT", "DEVICES"], ["live", "750"], ["failed", "250"]]
    assert lines[3:6] == [
        "250 devices [device.unreachable]: off",
        "  d0000, d0004, d0008, d0012, d0016 and 245 more",
        "every device: edgert rollout status echo-r2-1",
    ]
    assert lines[6].startswith("echo release 2: 750 of 1000 devices; stopped")
    assert len(lines) == 8


def test_a_release_that_scored_less_gives_a_warning_with_the_devices_and_the_command_to_roll_back() -> None:
    worse = "it scored 0.93, release 1 scored 0.97"
    shown = rollout_table(ended(live("a", warning=worse), live("b", warning=worse), live("c")))
    assert f"warning: {worse}: a, b\n" in shown
    assert shown.endswith("edgert rollback echo DEVICE rolls it back")
    assert rollout_table(ended(live("a"), live("b"), live("c"))).count("warning") == 0


def test_a_rollout_to_no_device_is_shown() -> None:
    for every in (True, False):
        assert "echo release 2: 0 of 0 devices" in rollout_table(replace(ROLLOUT, devices=()), every=every)


def test_names_and_errors_from_other_hosts_do_not_break_the_columns() -> None:
    odd = EdgeRTError("b: no\nspace\x1b[2J")
    rows = rollout_table(ended(live("a"), failed("plänt-ü", odd), devices=("a", "plänt-ü"))).splitlines()
    assert rows[1].index("live") == rows[2].index("failed")


def test_the_json_has_every_device_in_order_with_every_field() -> None:
    value = json.loads(json.dumps(rollout_json(ended(failed("c"), live("a"), reason="r", by="ann@a"))))
    assert value["rollout"] == {"id": "echo-r2-1", "state": "stopped", "reason": "r", "left": ["b", "c"], "by": "ann@a"}
    assert value["bundle"] == {"model": "echo", "release": 2, "digest": "digest"}
    assert [(device["device"], device["result"]) for device in value["devices"]] == [
        ("a", "live"), ("b", "not-begun"), ("c", "failed"),
    ]  # fmt: skip
    assert {frozenset(device) for device in value["devices"]} == {frozenset(to_json(live("a")))}
    assert value["devices"][2]["error"]["code"] == "device.unreachable"


# --- plans


@pytest.fixture(scope="module")
def request_of_plan(tmp_path_factory: pytest.TempPathFactory) -> DeployRequest:
    bundle = make_null_bundle(tmp_path_factory.mktemp("b"), new_key(), release=3)
    return DeployRequest(bundle, read_offer(bundle), 60.0, open_transport, dry_run=True)


def planned(device: str, sent_bytes: int, *steps: Step, **more: Any) -> Outcome:
    return Outcome(device, Result.PLANNED, steps, sent_bytes=sent_bytes, **more)


def plan_lines(request: DeployRequest, outcomes: Sequence[Outcome], waves: list[list[str]]) -> list[list[str]]:
    return [line.split() for line in plan_table(request, outcomes, waves).splitlines()]


def test_a_plan_shows_waves_and_sizes_and_steps_and_the_reason_of_a_refusal(request_of_plan: DeployRequest) -> None:
    refused = Outcome("c", Result.REFUSED, error=ErrorText.of(RolledBack("c: release 4 is live")))
    outcomes = [planned("a", 1_234_567, Step.SEND, Step.INSTALL), planned("b", 0), refused]
    assert plan_lines(request_of_plan, outcomes, [["a"], ["b", "c"]]) == [
        ["DEVICE", "WAVE", "RESULT", "TO", "SEND", "STEPS"],
        ["a", "1", "planned", "1.2", "MB", "send", "install"],
        ["b", "2", "planned", "0", "bytes"],
        ["c", "2", "refused"],
        ["c", f"[{RolledBack.code}]:", "release", "4", "is", "live"],
        ["echo", "release", "3:", "2", "of", "3", "devices"],
    ]


def test_a_plan_names_what_the_devices_would_watch(request_of_plan: DeployRequest) -> None:
    request = replace(request_of_plan, limits=TrialLimits({"p99_ms": 8.0}, 90.0))
    shown = plan_table(request, [planned("a", 0)], [["a"]])
    assert shown.endswith("echo release 3: 1 of 1 device\non trial: p99_ms <= 8 ms over 90 s")
    assert "on trial" not in plan_table(request_of_plan, [planned("a", 0)], [["a"]])


def test_the_json_of_a_plan_has_its_waves(request_of_plan: DeployRequest) -> None:
    value = json.loads(json.dumps(plan_json(request_of_plan, [planned("a", 5, Step.SEND)], [["a"]])))
    assert (value["waves"], value["bundle"]["release"]) == ([["a"]], 3)
    assert (value["devices"][0]["steps"], value["devices"][0]["sent_bytes"]) == (["send"], 5)
