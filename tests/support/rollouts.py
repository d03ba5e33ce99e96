"""A rollout that tests change by `dataclasses.replace`."""

from __future__ import annotations

from edgert_deploy.rollout.rollout_record import Rollout
from edgert_deploy.rollout.waves import Strategy

ROLLOUT = Rollout(
    id="echo-r2-1",
    bundle="b",
    digest="digest",
    model="echo",
    release=2,
    inventory="inventory.toml",
    devices=("a", "b", "c"),
    strategy=Strategy(),
    trial_s=60.0,
)
