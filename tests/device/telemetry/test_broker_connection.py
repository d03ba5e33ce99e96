"""The stored state of the forwarder's connection: a lost or damaged state is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.telemetry.broker_connection import (
    CONNECTED,
    BrokerConnection,
    read_broker_connection,
    write_broker_connection,
)


def test_the_last_note_is_read_back(tmp_path: Path) -> None:
    assert read_broker_connection(tmp_path) == BrokerConnection()
    write_broker_connection(tmp_path, "telemetry.broker_unreachable", "no broker answers")
    write_broker_connection(tmp_path, CONNECTED, "connected to b:1883")
    connection = read_broker_connection(tmp_path)
    assert (connection.state, connection.text) == (CONNECTED, "connected to b:1883")
    assert connection.at > 1_600_000_000


@pytest.mark.parametrize("damage", ["{", "[]", '{"state": "connected"}', "[" * 100_000])
def test_a_damaged_note_is_read_as_no_note(tmp_path: Path, damage: str) -> None:
    (tmp_path / "connection.json").write_text(damage)
    assert read_broker_connection(tmp_path) == BrokerConnection()


def test_a_note_for_a_missing_folder_is_not_written(tmp_path: Path) -> None:
    write_broker_connection(tmp_path / "missing", CONNECTED, "")
    assert not (tmp_path / "missing").exists()
