"""A strategy splits a fleet into waves, and limits the failures of a rollout."""

from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert.typed_json import Mistyped, from_json, to_json
from edgert_deploy.rollout.waves import CountOrShare, Strategy


def sizes(total: int, canary: int = 0, waves: str = "") -> list[int]:
    return [len(wave) for wave in Strategy.parse(canary, waves, None, 8, 0).split(total)]


@pytest.mark.parametrize(
    ("total", "canary", "waves", "expected"),
    [
        (10, 0, "", [10]),
        (1, 1, "10%,50%,100%", [1]),
        (100, 1, "10%,50%,100%", [1, 9, 40, 50]),
        (3, 1, "10%,50%", [1, 1, 1]),
        (20, 0, "5,10%,100%", [5, 15]),
        (4, 9, "", [4]),
        (7, 2, "2.5%", [2, 5]),
    ],
)
def test_every_device_is_in_one_wave(total: int, canary: int, waves: str, expected: list[int]) -> None:
    assert sizes(total, canary, waves) == expected
    ranges = Strategy.parse(canary, waves, None, 8, 0).split(total)
    assert [i for wave in ranges for i in wave] == list(range(total))


@pytest.mark.parametrize("text", ["", "x", "-1", "101%", "10 %x", "%", "9" * 5000, "\u0663", "0.00001%"])
def test_a_text_that_is_not_a_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="share"):
        CountOrShare.parse(text)


@pytest.mark.parametrize("waves", ["10%,5%", "10%,10%,100%", "20,5"])
def test_a_wave_that_adds_no_device_is_refused(waves: str) -> None:
    with pytest.raises(ConfigInvalid, match="adds no device"):
        Strategy.parse(0, waves, None, 8, 0)


def test_a_rollout_in_waves_stops_at_the_first_failure_by_default() -> None:
    assert Strategy.parse(0, "", None, 8, 0).max_failures is None
    assert Strategy.parse(1, "", None, 8, 0).max_failures == "0"
    assert Strategy.parse(1, "", "5%", 8, 0).max_failures == "5%"


@pytest.mark.parametrize(
    ("limit", "failed", "begun", "too_many"),
    [
        ("0", 1, 100, True),
        ("2", 2, 3, False),
        ("5%", 1, 1, True),
        ("5%", 5, 100, False),
        ("5%", 6, 100, True),
        ("29%", 29, 100, False),
        ("29%", 30, 100, True),
    ],
)
def test_more_failures_than_the_limit_are_too_many(limit: str, failed: int, begun: int, too_many: bool) -> None:
    assert CountOrShare.parse(limit).exceeded(failed, begun) is too_many


def test_a_strategy_is_read_back_unchanged() -> None:
    strategy = Strategy.parse(2, "10%,50,100%", "2.5%", 20, 30.0)
    assert from_json(Strategy, to_json(strategy)) == strategy


def test_a_strategy_with_another_text_than_a_share_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="share"):
        Strategy.parse(1, "", "many", 8, 0)
    with pytest.raises(Mistyped, match="share"):
        from_json(Strategy, {"waves": ["10 %x"]})


@pytest.mark.parametrize("text", ["0.0001%", "99.9999%", "12.3456%", "100%", "999999999"])
def test_a_share_is_written_in_the_form_that_was_given(text: str) -> None:
    assert str(CountOrShare.parse(text)) == text
