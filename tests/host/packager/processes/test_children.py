"""The children of a build: a crash of an engine ends one child, and the command gets an error."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import EngineFailed
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.processes.children import STORED_MAX, arrays_of, cause_text
from edgert_deploy.packager.processes.sandbox import ChildFailed
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

HERE = __name__


def doubled(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    for array in arrays:
        array += array  # the arrays in the command do not change
    return arrays


def ends(number: int) -> list[NDArray[Any]]:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"of an engine")
    os.kill(os.getpid(), number)
    return []


def refuses(given: None) -> list[NDArray[Any]]:
    raise EngineFailed("the engine cannot load this")


def folder_of_temporary_files(given: None) -> list[NDArray[Any]]:
    return [np.frombuffer(tempfile.gettempdir().encode(), np.uint8)]


def test_arrays_of_every_kind_are_returned_and_the_given_arrays_stay_unchanged() -> None:
    given: list[NDArray[Any]] = [
        np.arange(12, dtype=np.int64).reshape(3, 4),
        np.ones((2, 3), np.float16),
        np.zeros((0, 4), np.float32),
        np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
        np.arange(20, dtype=np.float64)[::2],
    ]
    before = [array.copy() for array in given]
    for want, own, got in zip(before, given, arrays_of(f"{HERE}:doubled", given), strict=True):
        np.testing.assert_array_equal(got, want + want)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(own, want)
    assert arrays_of(f"{HERE}:doubled", []) == []


def test_a_repeated_value_is_written_once_and_few_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given = [[np.full(3, i, np.float32)] for i in range(STORED_MAX + 2)]
    for one in given[:2] * 2:
        np.testing.assert_array_equal(arrays_of(f"{HERE}:doubled", one)[0], 2 * one[0])
    first = {path.name for path in tmp_path.iterdir()}
    assert len(first) == 2
    for one in given:
        np.testing.assert_array_equal(arrays_of(f"{HERE}:doubled", one)[0], 2 * one[0])
    assert len(list(tmp_path.iterdir())) == STORED_MAX
    for path in tmp_path.iterdir():  # a build removes its folder in this way
        path.unlink()
    np.testing.assert_array_equal(arrays_of(f"{HERE}:doubled", given[-1])[0], 2 * given[-1][0])


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGSEGV, r"crashed \(SIGSEGV\)"),
        (signal.SIGABRT, r"crashed \(SIGABRT: .*\)"),
        (signal.SIGKILL, "ran out of memory"),
    ],
)
def test_a_crash_is_an_error_without_a_remaining_file_and_the_next_request_is_answered(
    number: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ChildFailed) as caught:
        arrays_of(f"{HERE}:ends", number)
    assert re.fullmatch(says, cause_text(caught.value))
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("edgert-stored-")]
    (name,) = arrays_of(f"{HERE}:folder_of_temporary_files", None)
    assert Path(name.tobytes().decode()).parent == tmp_path


def test_an_edgert_error_keeps_its_class() -> None:
    with pytest.raises(EngineFailed, match="cannot load this"):
        arrays_of(f"{HERE}:refuses", None)


def test_an_engine_that_crashes_on_a_sample_ends_only_its_child(tmp_path: Path) -> None:
    """The crash is real: ONNX Runtime divides the lowest INT64 by -1."""
    path = models.write(models.dividing(), tmp_path / "m.onnx")
    source, artifact = load_source(path), Artifact("onnxruntime", "fp32", path, (), "onnxruntime", {})
    samples = models.for_dividing(20)
    with pytest.raises(ChildFailed, match="SIGFPE"):
        artifact_outputs(artifact, source, CalibrationSet({"x": models.crashing(samples)}, None))
    answers = artifact_outputs(artifact, source, CalibrationSet({"x": samples}, None))
    np.testing.assert_array_equal(answers[0], samples)
