"""Durations have one syntax, which the device and the host read and write."""

from __future__ import annotations

import pytest

from edgert.durations import duration_s, duration_text
from edgert.errors import ConfigInvalid


def test_durations_have_a_unit() -> None:
    texts = ("90s", "1.5m", "2h", "7d", "0", "0.5s")
    assert [duration_s(text) for text in texts] == [90, 90, 7200, 604_800, 0, 0.5]


def test_a_duration_is_written_in_its_largest_whole_unit() -> None:
    assert [duration_text(seconds) for seconds in (90, 600, 7200, 86_400, 0.5, 0)] == [
        *("90s", "10m", "2h", "1d", "0.5s", "0s")
    ]


@pytest.mark.parametrize("text", ["0.1s", "12345.678s", "0.123457h", "0.000001m", "33.333333s", "999999999999d"])
def test_a_duration_is_equal_after_it_was_written_and_read_again(text: str) -> None:
    seconds = duration_s(text)
    assert duration_s(duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["90", "soon", "-1s", "1w", "1 h", "", "1e3s", "s", "\u0661s", "9" * 13 + "s", "nans"])
def test_other_forms_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="such as"):
        duration_s(text)
