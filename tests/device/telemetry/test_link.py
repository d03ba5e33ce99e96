"""The note about the forwarder's connection: kept beside the spool, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.telemetry.link import CONNECTED, Link, read_link, write_link


def test_the_last_note_is_read(tmp_path: Path) -> None:
    assert read_link(tmp_path) == Link()
    write_link(tmp_path, "telemetry.broker_unreachable", "no broker answers")
    write_link(tmp_path, CONNECTED, "connected to b:1883")
    link = read_link(tmp_path)
    assert (link.state, link.text) == (CONNECTED, "connected to b:1883")
    assert link.at > 1_600_000_000


@pytest.mark.parametrize("damage", ["{", "[]", '{"state": "connected"}', "[" * 100_000])
def test_a_damaged_note_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "link.json").write_text(damage)
    assert read_link(tmp_path) == Link()


def test_a_folder_that_is_missing_costs_only_the_note(tmp_path: Path) -> None:
    write_link(tmp_path / "missing", CONNECTED, "")
    assert not (tmp_path / "missing").exists()
