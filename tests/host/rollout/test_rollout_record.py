"""The lines of a record give the same rollout in any order and from any number of hosts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from edgert.errors import ErrorText
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.plan import Step
from edgert_deploy.rollout.rollout_record import Record, Rollout, RolloutState, new_record
from edgert_deploy.rollout.waves import Strategy
from tests.support.rollouts import ROLLOUT

A_LIVE, C_LIVE = (Outcome(name, Result.LIVE, tuple(Step), 2, None, 1.5, 77, 0.25) for name in "ac")
A_FAILED, B_FAILED = (Outcome(name, Result.FAILED, error=ErrorText("x", "y")) for name in "ab")


def ended(state: RolloutState = RolloutState.DONE, **results: str) -> Rollout:
    """Return a rollout with these results by device."""
    outcomes = {name: Outcome(name, Result(result)) for name, result in results.items()}
    return replace(ROLLOUT, state=state, outcomes=outcomes)


@pytest.mark.parametrize(
    ("rollout", "left", "changed", "resumable"),
    [
        (ended(a="live", b="unchanged", c="failed"), ["c"], ["a"], True),
        (ended(a="failed", b="failed", c="failed"), ["a", "b", "c"], [], True),
        (ended(a="refused", b="refused", c="refused"), ["a", "b", "c"], [], False),
        (ended(a="refused", b="live"), ["a", "c"], ["b"], True),
        (ended(a="live", b="live", c="refused"), ["c"], ["a", "b"], False),
        (ended(a="live", b="live", c="live"), [], ["a", "b", "c"], False),
        (ended(RolloutState.ABORTED, a="live", b="failed"), ["b", "c"], ["a"], False),
    ],
)
def test_a_rollback_names_the_changed_devices_and_a_resume_names_the_devices_that_are_left(
    rollout: Rollout, left: list[str], changed: list[str], resumable: bool
) -> None:
    assert (rollout.left, rollout.changed, rollout.resumable) == (left, changed, resumable)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_lost_link_interrupts_a_rollout_but_a_failed_release_does_not(rolled_back: bool) -> None:
    lost = Outcome("a", Result.FAILED, error=ErrorText("device.unreachable", "the connection broke"))
    rollout = replace(ended(), outcomes={"a": lost, "b": B_FAILED})
    assert [rollout.interrupted(device, rolled_back) for device in "ab"] == [True, False]
    assert not replace(rollout, state=RolloutState.ABORTED).interrupted("a", rolled_back)
    assert replace(rollout, state=RolloutState.RUNNING).interrupted("a", rolled_back) == rolled_back


def test_the_lines_of_a_record_give_the_same_rollout_in_any_order() -> None:
    limits = TrialLimits({"p99_ms": 8.0}, 60.0, False, 60.0)
    whole = replace(ROLLOUT, strategy=Strategy.parse(1, "50%", "5%", 8, 60.0), limits=limits, by="ann@a", number=7)
    record, lines = new_record(whole)
    for changed in (
        replace(whole, outcomes={"a": A_FAILED}),
        replace(whole, outcomes={"a": A_LIVE, "b": B_FAILED}),
        replace(
            whole,
            outcomes={"a": A_LIVE, "b": B_FAILED},
            devices=("a", "b"),
            state=RolloutState.STOPPED,
            reason="by the user",
        ),
    ):
        record, more = record.changed_to(changed)
        lines += more
        assert Record.read(lines) == record
    assert record.changed_to(changed)[1] == [], "what did not change adds no line"
    for order in itertools.permutations(lines):
        assert Record.read([*order, order[0]]) == record


def test_two_hosts_that_continue_one_rollout_agree_and_an_abort_is_final() -> None:
    base, lines = new_record(replace(ROLLOUT, state=RolloutState.STOPPED))
    _, on_a = base.changed_to(
        replace(base.rollout, outcomes={"a": A_LIVE, "b": B_FAILED}, state=RolloutState.RUNNING, by="ann@a")
    )
    _, on_b = base.changed_to(
        replace(base.rollout, outcomes={"c": C_LIVE}, state=RolloutState.ABORTED, reason="no", by="bob@b")
    )
    merged = Record.read([*lines, *on_a, *on_b]).rollout
    assert merged == Record.read([*lines, *on_b, *on_a]).rollout
    assert (merged.outcomes, merged.state, merged.by) == (
        {"a": A_LIVE, "b": B_FAILED, "c": C_LIVE},
        RolloutState.ABORTED,
        "bob@b",
    )


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    record, (head, state) = new_record(replace(ROLLOUT, by="ann@a"))
    newer = {"rollout": {**json.loads(head)["rollout"], "colour": "red"}}
    assert Record.read([json.dumps(newer), state, '{"n":2,"mood":"good"}']).rollout == record.rollout


def test_an_outcome_that_lacks_fields_is_read_and_belongs_to_the_device_of_its_line() -> None:
    _, lines = new_record(ROLLOUT)
    outcome = {"device": "b", "result": "live"}
    read = Record.read([*lines, json.dumps({"n": 9, "device": "a", "outcome": outcome})]).rollout
    assert read.outcomes == {"a": Outcome("a", Result.LIVE)}
