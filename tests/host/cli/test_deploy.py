"""The table of a rollout names only next steps that help."""

from __future__ import annotations

from typing import Any

import pytest

from edgert_deploy.cli.deploy import rollout_table
from edgert_deploy.rollout.deployment import Outcome
from edgert_deploy.rollout.rollout_store import STOPPED, Rollout
from edgert_deploy.rollout.waves import Strategy


@pytest.mark.parametrize(
    ("results", "next_step"),
    [
        (("live", "live"), ""),
        (("live", "failed"), "next: edgert rollout resume echo-r2-1, or edgert rollback echo a"),
        (("failed", "failed"), "next: edgert rollout resume echo-r2-1"),
        (("unchanged", "failed"), "next: edgert rollout resume echo-r2-1"),
        (("live", "refused"), "next: edgert rollback echo a"),
        (("refused", "refused"), ""),
    ],
)
def test_a_roll_back_is_offered_only_for_devices_that_took_the_release(
    results: tuple[str, ...], next_step: str
) -> None:
    outcomes: dict[str, Any] = {
        name: Outcome(name, result).as_json() for name, result in zip("ab", results, strict=True)
    }
    rollout = Rollout("echo-r2-1", "b", "d", "echo", 2, "i", ("a", "b"), Strategy(), 60.0, STOPPED, outcomes=outcomes)
    last = rollout_table(rollout).splitlines()[-1]
    assert last == next_step or (not next_step and "next:" not in rollout_table(rollout))
