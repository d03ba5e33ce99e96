"""`preprocess.toml` and `labels.txt`: what fits the model is read, the rest is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")

from edgert.errors import ConfigInvalid
from edgert.manifest import Preprocess
from edgert.tensors import TensorSpec
from edgert_deploy.processing import read_classify, read_preprocess
from edgert_deploy.source import SourceModel

INPUTS = (TensorSpec("image", "FP32", (-1, 3, 8, 8)), TensorSpec("mask", "UINT8", (-1, 8)))
OUTPUTS = (TensorSpec("boxes", "FP32", (-1, 4)), TensorSpec("scores", "FP32", (-1, 2)))
SOURCE = SourceModel(Path("m.onnx"), None, "0" * 64, 1, INPUTS, OUTPUTS)


def preprocess(folder: Path, text: str) -> Preprocess:
    (folder / "pre.toml").write_text(text)
    return read_preprocess(folder / "pre.toml", SOURCE)


def test_all_keys_are_read_and_all_but_the_input_may_be_left_out(tmp_path: Path) -> None:
    text = 'input = "image"\nscale = 0.5\nmean = [1, 2, 3]\nstd = 2.0\nlayout = "nhwc"\n'
    assert preprocess(tmp_path, text) == Preprocess("image", 0.5, (1.0, 2.0, 3.0), (2.0,), "nhwc")
    assert preprocess(tmp_path, 'input = "image"') == Preprocess("image")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no input"),
        ('input = "x"', "it has: image, mask"),
        ('input = "mask"', "is UINT8"),
        ('input = "image"\nsize = 3', "unknown keys size"),
        ('input = "image"\nmean = [1, 2]', "give 1, or 3"),
        ('input = "image"\nstd = [1, 0, 1]', "differ from 0"),
        ('input = "image"\nmean = "none"', "should be a number"),
        ('input = "image"\nmean = []', "should be a number"),
        ('input = "image"\nscale = nan', "should be a number"),
        ('input = "image"\nlayout = "chwn"', "known"),
        ("input = ", "not TOML"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        preprocess(tmp_path, text)


def test_labels_find_the_output_that_they_fit(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\n\n dog \n")
    classify = read_classify(tmp_path / "labels.txt", SOURCE)
    assert (classify.output, classify.labels) == ("scores", ("cat", "dog"))


@pytest.mark.parametrize("data", [b"", b"a\nb\nc\n", b"\xff\xfe\n"])
def test_labels_that_fit_nothing_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    for path in (tmp_path / "labels.txt", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigInvalid):
            read_classify(path, SOURCE)
