"""A file is replaced at once or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgert.durable import replace_file, replacing


def test_an_error_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_file(path, b"old")

    def fails() -> None:
        with replacing(path) as file:
            file.write(b"half of the n")
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_power_cut_left_beside_it_is_taken_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    (tmp_path / ".state.json.new").write_bytes(b"half of something long")
    replace_file(path, b"new", mode=0o640)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_no_link_beside_it_is_followed(tmp_path: Path, shared: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / (f".it.{os.getpid()}.new" if shared else ".it.new")).symlink_to(victim)
    with pytest.raises(OSError):
        replace_file(tmp_path / "it", b"new", shared=shared)
    assert victim.read_bytes() == b"mine"
