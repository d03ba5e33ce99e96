"""The error names a Git LFS pointer that is given as a model or as weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("onnx")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.formats.external_data import open_file
from edgert_deploy.packager.sources.formats.git_lfs import pointer_problem
from edgert_deploy.packager.sources.source_model import load_source

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 102400\n"


def test_only_a_pointer_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(POINTER)
    (tmp_path / "b").write_bytes(b"version 2")
    assert "run git lfs pull" in pointer_problem(tmp_path / "a")
    assert [pointer_problem(tmp_path / name) for name in ("b", "missing", ".")] == ["", "", ""]


@pytest.mark.parametrize("name", ["pipe.onnx", "pipe.pt", "/dev/zero"])
def test_a_pipe_or_a_device_is_refused_before_it_is_opened(name: str, tmp_path: Path) -> None:
    """A pipe would wait for a writer, and a device may have no end."""
    if name.startswith("pipe"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(SourceInvalid, match="is a named pipe or a device"):
        load_source(tmp_path / name)


@pytest.mark.parametrize("name", ["m.onnx", "m.tflite", "m.pt", "m.keras", "saved/saved_model.pb", "saved/variables/v"])
def test_a_pointer_in_place_of_a_model_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "saved" in name:
        (tmp_path / "saved" / "saved_model.pb").touch()
    path.write_bytes(POINTER)
    with pytest.raises(SourceInvalid, match=f"{path} is a Git LFS pointer.*git lfs pull"):
        load_source(tmp_path / "saved" if "saved" in name else path)


def test_a_pointer_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_bytes(POINTER)
    with pytest.raises(SourceInvalid, match=r"m\.onnx\.data is a Git LFS pointer"):
        open_file(tmp_path / "m.onnx", "m.onnx.data")
