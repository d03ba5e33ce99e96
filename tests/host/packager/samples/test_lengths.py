"""Samples of different lengths: from a function, from files, and from stacked arrays with `lengths`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import CalibrationInvalid
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.models.exported import FOLDER
from tests.support.models.texts import source_in, texts, write_texts

ROWS = texts(12)
LENGTHS = [len(row["ids"]) for row in ROWS]
MODULE = """
import numpy as np
from tests.support.models.texts import texts

def samples():
    return texts(12)

def uneven():
    for i, row in enumerate(texts(12)):
        yield {**row, "mask": row["mask"][:-1]} if i == 3 else row

def long():
    yield {name: np.ones(40, np.int64) for name in ("ids", "mask")}
"""


@pytest.fixture(scope="module")
def source() -> SourceModel:
    return source_in("tokens=8,16,32", "ids=9")


def check(samples: CalibrationSet) -> None:
    """Check that `samples` are ROWS, padded."""
    assert samples.lengths is not None
    assert samples.lengths.tolist() == LENGTHS
    for i, row in enumerate(ROWS):
        assert samples.inputs["ids"][i, : LENGTHS[i]].tolist() == row["ids"].tolist()
        assert (samples.inputs["ids"][i, LENGTHS[i] :] == 9).all()
        assert (samples.inputs["mask"][i, LENGTHS[i] :] == 0).all()
    assert samples.inputs["ids"].shape == (12, 32)


def test_a_folder_with_a_file_for_each_sample_is_read(source: SourceModel, tmp_path: Path) -> None:
    check(load_samples(write_texts(tmp_path / "texts", ROWS), source, at_least=10))


def test_a_function_gives_samples_of_different_lengths(
    source: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "field_texts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    check(load_samples(Path("field_texts:samples"), source, at_least=10))
    with pytest.raises(CalibrationInvalid, match="inputs of sample 3 of field_texts:uneven differ in length"):
        load_samples(Path("field_texts:uneven"), source, at_least=10)
    with pytest.raises(
        CalibrationInvalid, match=r"sample 0 of field_texts:long has length 40 along axis 'tokens'.*1 to 32"
    ):
        load_samples(Path("field_texts:long"), source, at_least=1)


def test_stacked_arrays_with_lengths_get_the_stated_padding_whatever_they_held(
    source: SourceModel, tmp_path: Path
) -> None:
    ids, mask = (np.full((12, 35), 5, np.int64) for _ in range(2))
    for i, row in enumerate(ROWS):
        ids[i, : LENGTHS[i]], mask[i, : LENGTHS[i]] = row["ids"], row["mask"]
    path = models.write_samples(tmp_path / "s.npz", ids=ids, mask=mask, lengths=np.array(LENGTHS))
    check(load_samples(path, source, at_least=10))


def test_samples_of_stacked_arrays_without_lengths_have_the_length_of_the_array(
    source: SourceModel, tmp_path: Path
) -> None:
    ids = np.arange(120).reshape(12, 10) % 40
    samples = load_samples(
        models.write_samples(tmp_path / "s.npz", ids=ids, mask=np.ones_like(ids)), source, at_least=10
    )
    assert samples.lengths is not None
    assert samples.lengths.tolist() == [10] * 12
    assert samples.sizes.tolist() == [16] * 12
    served = samples.served(3)
    assert served["ids"].shape == (1, 16)
    assert served["ids"][0, :10].tolist() == ids[3].tolist()


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        (np.array([3] * 11), "give one whole number per sample"),
        (np.array([3.5] * 12), "give one whole number per sample"),
        (np.array([11] * 12), "at most 10, the length of the arrays"),
        (np.array([0] * 12), "sample 0 of .* has length 0 along axis 'tokens'"),
    ],
)
def test_lengths_that_the_arrays_do_not_have_are_refused(
    source: SourceModel, tmp_path: Path, lengths: NDArray[Any], says: str
) -> None:
    ids = np.ones((12, 10), np.int64)
    path = models.write_samples(tmp_path / "s.npz", ids=ids, mask=ids, lengths=lengths)
    with pytest.raises(CalibrationInvalid, match=says):
        load_samples(path, source, at_least=10)


def test_stacked_inputs_of_different_lengths_are_refused(source: SourceModel, tmp_path: Path) -> None:
    path = models.write_samples(tmp_path / "s.npz", ids=np.ones((12, 10), np.int64), mask=np.ones((12, 11), np.int64))
    with pytest.raises(CalibrationInvalid, match="differ in length along axis 'tokens'"):
        load_samples(path, source, at_least=10)


def test_lengths_are_refused_for_a_model_without_buckets(tmp_path: Path) -> None:
    path = models.write_samples(tmp_path / "s.npz", image=models.random(12, 3, 16, 16), lengths=np.ones(12, np.int64))
    with pytest.raises(CalibrationInvalid, match="not inputs of the model: 'lengths'"):
        load_samples(path, load_source(FOLDER / "picture.onnx"), at_least=10)
