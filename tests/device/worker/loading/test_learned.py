"""Learned settings are kept for equal circumstances; a damaged file is treated like a missing file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.worker.loading.learned import Learned, LearnedFile
from tests.support.circumstances import circumstances


def test_learned_settings_are_used_only_under_the_same_circumstances(tmp_path: Path) -> None:
    file = LearnedFile(tmp_path / "learned", "ab" * 32)
    learned = Learned(threads=2, batch_cap=16, run_us={"1": 10.0})
    assert file.read(circumstances()) is None
    file.write(circumstances(), learned)
    assert file.read(circumstances()) == learned
    for other in (
        {"cpus": 8},
        {"engine_version": "2"},
        {"optimize_for": "throughput"},
        {"batch_max": 4},
        {"threads": 1},
    ):
        assert file.read(circumstances(**other)) is None


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"learned": 1}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, damage: str) -> None:
    file = LearnedFile(tmp_path, "ab" * 32)
    file.write(circumstances(), Learned(2))
    next(tmp_path.iterdir()).write_text(damage)
    assert file.read(circumstances()) is None


@pytest.mark.parametrize(
    "learned", [Learned(1, batch_cap=0), Learned(1, instances=300), Learned(1, instances=200, reactor_session=True)]
)
def test_a_number_out_of_range_is_measured_again(tmp_path: Path, learned: Learned) -> None:
    file = LearnedFile(tmp_path, "ab" * 32)
    file.write(circumstances(), learned)
    assert file.read(circumstances()) is None
