"""A build's temporary folder: an error about too little space names the folder, the space and the variable to set."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from edgert.errors import BuildFailed
from edgert_deploy.packager.processes.work_folder import free_bytes, work_folder

MB = 10**6


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_folder_is_removed_afterwards(tmp_path: Path) -> None:
    with work_folder(1) as folder:
        assert folder.parent == tmp_path
        assert free_bytes(folder) > 0
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_the_build_and_of_its_tools_are_in_the_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with work_folder() as folder:
        own = Path(tempfile.mkdtemp(prefix="edgert-qdq-"))
        tool = subprocess.run(["mktemp"], capture_output=True, text=True, check=True)
        assert own.parent == Path(tool.stdout.strip()).parent == folder
    assert tempfile.gettempdir() == str(tmp_path)
    assert "TMPDIR" not in os.environ
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_refused_before_the_build_begins(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildFailed, match=r"has 5\.0 MB free, and this build needs about 80\.0 MB.*TMPDIR=") as caught,
        work_folder(80 * MB, lambda _: 5 * MB),
    ):
        raise AssertionError("the build began")
    assert str(tmp_path) in caught.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), BuildFailed("onnxruntime's quantizer failed: No space left on device")]
)
def test_the_error_about_a_disk_that_becomes_full_names_the_folder(error: Exception, tmp_path: Path) -> None:
    free = iter([90 * MB, 1 * MB])
    with pytest.raises(BuildFailed, match=r"TMPDIR=") as caught, work_folder(80 * MB, lambda _: next(free)):
        raise error
    assert str(tmp_path) in caught.value.message


def test_only_a_full_work_folder_is_reported_as_full() -> None:
    for error in (OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "the bundle's disk is full")):
        with pytest.raises(OSError, match=str(error.strerror)), work_folder(80 * MB, lambda _: 90 * MB):
            raise error
