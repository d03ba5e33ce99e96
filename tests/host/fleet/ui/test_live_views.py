"""A stream sends only what changed."""

from __future__ import annotations

import json
from pathlib import Path

from edgert_deploy.fleet.ui.answers import A_PAGE, Answers
from edgert_deploy.fleet.ui.fleet_state import Filter
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.fleet import NOW_MS, Pi, Watched, tell

NOW = 1000.0  # monotonic seconds


def test_a_stream_sends_only_changes_and_the_whole_fleet_after_new_devices(tmp_path: Path) -> None:
    fleet_state, clock = Watched(), [NOW]
    live_views = LiveViews(fleet_state, Rollouts(RolloutStore(tmp_path / "none")), lambda: clock[0], lambda: NOW_MS)
    fleet = [Pi(f"pi-{number:05}") for number in range(10_000)]
    for pi in fleet:
        tell(fleet_state, pi.info())
    live_views.tick()
    first = live_views.view(Filter())
    assert first.counts["online"] == 10_000
    fleet_state.apply(fleet[7].topics.status, b"lost", True, NOW)
    assert live_views.view(Filter()) is first  # every stream gets the same view until the next tick
    live_views.tick()
    change = live_views.view(Filter()).changes_since(first)
    assert change is not None
    assert change["changed"] == [["plant-a", 7, "l"]]
    assert len(json.dumps(change)) < 2000
    tell(fleet_state, Pi("zz").info())
    live_views.tick()
    assert live_views.view(Filter()).changes_since(first) is None
    listed = Answers(live_views, None).devices({"state": "", "page": "3", "sort": "device"})  # type: ignore[arg-type]
    assert (listed["total"], len(listed["devices"]), listed["devices"][0]["device"]) == (10_001, A_PAGE, "pi-00100")
