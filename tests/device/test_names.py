"""Ids: the texts that can be a level of a topic and an exporter's label."""

from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert.names import ID_CHARS_MAX, checked_id


@pytest.mark.parametrize("value", ["pi-07", "a", "9a", "plant_a.north", "x" * ID_CHARS_MAX])
def test_a_valid_id_stays_unchanged(value: str) -> None:
    assert checked_id("device", value) == value


@pytest.mark.parametrize("value", ["", "-a", "a/b", "a b", "a+", "a#", "ä", "x" * (ID_CHARS_MAX + 1), "a\n"])
def test_an_id_that_a_topic_cannot_hold_is_refused(value: str) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be part of an MQTT topic"):
        checked_id("device", value)


@pytest.mark.parametrize("value", ["7", "1.10", "1e5", "0x10", "1_000", "nan", "inf"])
def test_an_id_that_an_exporter_reads_as_a_number_is_refused_with_a_proposal(value: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"'d{value}'"):
        checked_id("device", value)
