"""Sizes and rates have one syntax each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgert.bundle.expiry import expiry_time
from edgert.errors import ConfigInvalid
from edgert_deploy.common.quantities import (
    difference_text,
    expiry_from,
    rate_bytes_per_s,
    share_text,
    size_bytes,
    size_text,
)

NOW_S = expiry_time("2026-11-21T08:00:00Z")


def test_sizes_and_rates_are_decimal_and_have_a_unit() -> None:
    assert [size_bytes(text) for text in ("12B", "500KB", "2MB", "1.5GB", "2mb", "12.3 MB")] == [
        12,
        500_000,
        2_000_000,
        1_500_000_000,
        2_000_000,
        12_300_000,
    ]
    assert [rate_bytes_per_s(text) for text in ("500KB/s", "2MB/s")] == [500_000, 2_000_000]
    assert [size_text(size) for size in (67, 4_500, 12_300_000)] == ["67 bytes", "4.5 KB", "12.3 MB"]


def test_a_share_is_a_percentage_or_unknown() -> None:
    assert [share_text(share) for share in (0.0, 0.967, 1.0, None)] == ["0 %", "97 %", "100 %", "-"]


def test_a_difference_has_a_sign_and_no_negative_zero() -> None:
    assert [difference_text(each) for each in (0.5, -0.01234, 0.0, -0.0, -4e-5)] == [
        *("+0.5000", "-0.0123", "+0.0000", "+0.0000", "+0.0000")
    ]


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (size_bytes, ("500", "2M", "2  MB", "2 MB/s", "-1KB", "1PB", "5\u212aB", "")),
        (rate_bytes_per_s, ("500KB", "2MB/m", "fast", "")),
    ],
)
def test_other_forms_are_refused_with_an_example(parse: Callable[[str], float], texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(ConfigInvalid, match="such as"):
            parse(text)


def test_an_expiry_is_a_duration_from_now_or_a_day_or_a_future_moment() -> None:
    for given, stated in {
        "90d": "2027-02-19T08:00:00Z",
        "12h": "2026-11-21T20:00:00Z",
        "2027-02-19": "2027-02-19T23:59:59Z",
        "2027-02-19T08:00:00Z": "2027-02-19T08:00:00Z",
    }.items():
        assert expiry_from(given, NOW_S) == stated
    for wrong in ("soon", "90", "0d", "-1d", "2026-11-20", "2027-13-01", "2027-02-19T08:00:00+01:00"):
        with pytest.raises(ConfigInvalid):
            expiry_from(wrong, NOW_S)
