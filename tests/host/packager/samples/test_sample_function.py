"""Samples from the user's own function: valid samples are read, and each fault gives one clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.bundle.rules import Preprocess, Resize
from edgert.errors import CalibrationInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel

X, Z = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("z", "INT64", (-1, 2))
Y = TensorSpec("y", "FP32", (-1, 3))
ONE = SourceModel(Path("m.onnx"), None, "0" * 64, 1, (X,), (Y,))
TWO = SourceModel(Path("m.onnx"), None, "0" * 64, 1, (X, Z), (Y,))
IMAGE = SourceModel(Path("m.onnx"), None, "0" * 64, 1, (TensorSpec("x", "FP32", (-1, 3, 8, 8)),), (Y,))

# One module for a test run, because Python imports a module once.
MODULE = """
import sys
import numpy as np

def row(i, dtype=np.float32):
    return np.full(4, i, dtype)

def rows():
    print("the user's own words")
    for i in range(12):
        yield row(i)

def labelled():
    return [(row(i)[None], i % 3) for i in range(12)]

def of_two():
    same = np.zeros(2, np.int64)
    for i in range(12):
        same[:] = i
        yield {"x": row(i), "z": same}

def frames():
    for i in range(12):
        yield np.full((20, 30, 3), 10 * i, np.uint8)

def few():
    yield row(0)

def raises():
    yield row(0)
    yield row(1)
    raise KeyError("no such camera")

def exits():
    sys.exit(3)
    yield

def doubles():
    yield row(0, np.float64)

def long_rows():
    yield np.zeros(5, np.float32)

def batches():
    yield np.zeros((2, 4), np.float32)

def lists():
    yield [1.0, 2.0, 3.0, 4.0]

def some_labels():
    yield row(0), 1
    yield row(1)

def bad_label():
    yield row(0), "cat"

def none():
    return None

def endless():
    while True:
        yield row(0)

def needs_more():
    import no_such_package_at_all

no_function = 3
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "edgert_test_samples.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "edgert_test_samples", raising=False)
    return tmp_path


def load(function: str, source: SourceModel = ONE, rule: Preprocess | None = None) -> CalibrationSet:
    return load_samples(Path(f"edgert_test_samples:{function}"), source, rule, at_least=10)


def test_a_function_may_give_arrays_or_dictionaries_or_labels(
    in_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert load("rows").inputs["x"][:, 0].tolist() == list(range(12))
    assert capfd.readouterr().out == ""  # stdout belongs to the command's result
    labelled = load("labelled")
    assert labelled.labels is not None
    assert labelled.labels.tolist() == [0, 1, 2] * 4
    two = load("of_two", TWO)
    assert two.inputs["z"][:, 1].tolist() == list(range(12))  # although the function fills the same array again


def test_frames_are_preprocessed_by_the_rule(in_folder: Path) -> None:
    rule = Preprocess("x", 1 / 255, layout="nhwc", resize=Resize("stretch", 8, 8))
    images = load("frames", IMAGE, rule).inputs["x"]
    assert images.shape == (12, 3, 8, 8)
    np.testing.assert_allclose(images[:, 0, 0, 0], np.arange(12) * 10 / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("few", "has 1 sample; at least 10"),
        ("raises", r"failed at sample 2 with KeyError: 'no such camera' \(edgert_test_samples\.py, line 32\)"),
        ("exits", "failed at sample 0 with SystemExit: 3"),
        ("doubles", "sample 0 of .* is float64, but the model takes float32"),
        ("long_rows", r"has shape \[1, 5\]; the model takes \[samples, 4\]"),
        ("batches", "holds 2 items; return one item at a time"),
        ("lists", "list for input 'x'; return a NumPy array"),
        ("some_labels", "sample 1 of .* has no label"),
        ("bad_label", "label 'cat'; return the number of the class"),
        ("none", "returns a NoneType: yield samples, or return a list"),
        ("of_two", r"has 'x', 'z'; the model's inputs are 'x'"),
        ("needs_more", "No module named 'no_such_package_at_all'"),
        ("missing", "has no function 'missing'"),
        ("no_function", "has no function 'no_function'"),
    ],
)
def test_the_error_names_the_fault_of_the_function(function: str, says: str, in_folder: Path) -> None:
    with pytest.raises(CalibrationInvalid, match=says):
        load(function)


def test_one_array_for_a_model_of_two_inputs_is_refused(in_folder: Path) -> None:
    with pytest.raises(CalibrationInvalid, match="2 inputs: return a dictionary"):
        load("rows", TWO)


def test_the_error_names_a_missing_module(in_folder: Path) -> None:
    with pytest.raises(CalibrationInvalid, match="no module 'no_such_module_of_mine'"):
        load_samples(Path("no_such_module_of_mine:samples"), ONE, at_least=1)


def test_a_function_that_never_ends_is_stopped(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgert_deploy.packager.samples.sample_function.SAMPLES_MAX", 50)
    with pytest.raises(CalibrationInvalid, match="more than 50 samples"):
        load("endless")
