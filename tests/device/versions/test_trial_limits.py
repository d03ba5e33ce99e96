"""Trial limits are parsed from people's notation, and judged by measurements."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from edgert.errors import ConfigInvalid
from edgert.versions.trial_limits import (
    COMPARED_FEW,
    COMPARED_MIN,
    REQUESTS_MIN,
    Readings,
    TrialLimits,
    broken_limits,
    doubt,
    parse_limits,
)


def test_limits_are_read_in_the_notation_of_users_and_invalid_limits_are_refused() -> None:
    assert parse_limits(["p99_ms=8", "error_share=0.1%", "agreement=0.99", "temp_c=off"]) == {
        "p99_ms": 8.0,
        "error_share": pytest.approx(0.001),
        "agreement": 0.99,
        "temp_c": None,
    }
    for word, says in {
        "p98_ms=8": "unknown limit 'p98_ms'",
        "p99_ms": "give NAME=VALUE",
        "p99_ms=fast": "'fast' is not a number",
        "p99_ms=-1": "a number from 0 up",
        "p99_ms=nan": "a number from 0 up",
        "agreement=99": "a share from 0 to 1, or a percentage",
        "memory_mb=5%": "is a percentage; give a number of MB",
    }.items():
        with pytest.raises(ConfigInvalid, match=re.escape(says)):
            parse_limits([word])
    limits = TrialLimits({"p99_ms": 1 / 3}, 12345.678)
    assert limits.as_options() == ["--limit", f"p99_ms={1 / 3!r}", "--watch", "12345.678s"], (
        "a device keeps just what was asked"
    )


def test_a_limit_that_was_not_measured_is_broken_only_at_the_end() -> None:
    bounds = {
        "p99_ms": 8.0,
        "error_share": 0.1,
        "agreement": 0.9,
        "memory_mb": 50.0,
        "temp_c": 80.0,
        "min_requests": 5.0,
    }
    limits = TrialLimits(bounds)
    nothing = Readings(memory_mb=10.0)
    assert broken_limits(limits, nothing, at_end=False) == []
    assert [one.name for one in broken_limits(limits, nothing, at_end=True)] == [
        "p99_ms", "error_share", "agreement", "temp_c", "min_requests",
    ]  # fmt: skip
    few = Readings(requests=REQUESTS_MIN - 1, failed=50, p99_ms=100, compared=COMPARED_MIN - 1)
    assert broken_limits(limits, few, at_end=False) == []
    enough = replace(few, requests=REQUESTS_MIN, compared=COMPARED_MIN, temp_c=80.5)
    assert [one.name for one in broken_limits(limits, enough, at_end=False)] == [
        "p99_ms",
        "error_share",
        "agreement",
        "temp_c",
    ]
    held = Readings(requests=10, p99_ms=8.0, memory_mb=50.0, temp_c=80.0, compared=20, agreed=18)
    assert broken_limits(limits, held, at_end=True) == [], "a value at its limit holds"
    assert [one.name for one in broken_limits(limits, replace(held, golden=6), at_end=True)] == ["min_requests"]


def test_an_agreement_that_few_answers_decided_is_doubted() -> None:
    limits, few = TrialLimits({"agreement": 0.99}), Readings(requests=100, compared=COMPARED_MIN, agreed=COMPARED_MIN)
    assert doubt(limits, few).startswith("only 20 answers were compared for agreement")
    assert doubt(limits, replace(few, compared=COMPARED_FEW)) == ""
    assert doubt(limits, Readings()) == "", "such a limit does not hold at all"
    assert doubt(TrialLimits({"p99_ms": 8.0}), few) == ""
