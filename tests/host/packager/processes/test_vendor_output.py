"""Vendors' tools print nothing, in Python and in native code. Later output appears."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

from edgert_deploy.packager.processes.vendor_output import quiet, working_in


def test_output_is_dropped_inside_the_block_and_printed_after_it(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        print("banner")
        print("bar", file=sys.stderr)
        os.write(1, b"native")
        os.write(2, b"native")
        warnings.warn("old", stacklevel=1)
    print("result")
    os.write(2, b"progress")
    assert capfd.readouterr() == ("result\n", "progress")


def test_the_output_is_restored_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with quiet():
            print("banner")
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    print("result")
    assert capfd.readouterr().out == "result\n"


def test_the_working_folder_changes_inside_the_block_even_if_the_first_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "tools").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    with working_in(tmp_path / "tools"):
        Path("dump").touch()
        (tmp_path / "mine").rmdir()
    assert [path.name for path in (tmp_path / "tools").iterdir()] == ["dump"]
    with pytest.raises(FileNotFoundError):
        Path.cwd()
    monkeypatch.chdir(tmp_path)
