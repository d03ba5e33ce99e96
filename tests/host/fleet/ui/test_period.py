"""A period lasts until now, or has two times. The number of its steps is limited."""

from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.ui.period import STEPS_MAX, Period
from tests.support.fleet import NOW_MS

HOUR_MS = 60 * MINUTE_MS


@pytest.mark.parametrize(
    ("length", "step_min", "steps"),
    [("5m", 1, 5), ("90m", 1, 90), ("1h", 1, 60), ("24h", 15, 96), ("7d", 60, 168), ("400d", 4320, 134)],
)
def test_a_period_until_now_ends_with_the_step_that_has_begun(length: str, step_min: int, steps: int) -> None:
    period = Period.parse({"period": length})
    assert period.step_min(NOW_MS, None) == step_min
    since_ms, until_ms = period.stepped_ms(NOW_MS, step_min)
    step_ms = step_min * MINUTE_MS
    assert (until_ms - since_ms) // step_ms == steps <= STEPS_MAX
    assert NOW_MS < until_ms <= NOW_MS + step_ms
    assert (since_ms % step_ms, until_ms % step_ms) == (0, 0)


def test_a_period_between_two_times_does_not_depend_on_the_time_of_the_query() -> None:
    period = Period.parse({"from": "2026-09-21T13:50Z", "to": "2026-09-21T16:20:30+02:00"})
    for now_ms in (NOW_MS, NOW_MS + 10 * HOUR_MS):
        since_ms, until_ms = period.stepped_ms(now_ms, period.step_min(now_ms, None))
        assert (until_ms - since_ms) / MINUTE_MS == 31
    late_ms = NOW_MS + 100 * HOUR_MS
    assert period.step_min(late_ms, None) == period.step_min(late_ms, late_ms) == 60, "the store has whole hours only"
    assert period.step_min(late_ms, 0) == 1
    for step_min in (1, 60):
        since_ms, until_ms = period.stepped_ms(late_ms, step_min)
        assert ((until_ms - since_ms) / HOUR_MS, since_ms % HOUR_MS) == (2, 0)
    assert Period.parse({"period": "1h"}).step_min(late_ms, late_ms) == 1, "a store that has just begun"


@pytest.mark.parametrize(
    "asked",
    [
        {"period": "soon"}, {"period": "90"}, {"period": "1m"}, {"period": "500d"}, {"from": "2026-09-21T13:50Z"},
        {"from": "2026-09-21T13:50", "to": "2026-09-21T14:50"}, {"from": "x", "to": "y"},
        {"from": "2026-09-21T13:50Z", "to": "2026-09-21T13:40Z"}, {"from": "0001-01-01T00:00+23:00", "to": "2026-09-21T13:40Z"},
        {"period": "1h", "from": "2026-09-21T13:50Z", "to": "2026-09-21T14:50Z"},
    ],
)  # fmt: skip
def test_an_invalid_period_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(ConfigInvalid):
        Period.parse(asked)


def test_a_period_with_one_end_names_the_missing_end() -> None:
    with pytest.raises(ConfigInvalid, match="give `to`, too"):
        Period.parse({"from": "2026-09-21T13:50Z"})
