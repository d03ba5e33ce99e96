"""The axis that stays open for buckets has a name, and outputs must depend on its length in a fixed ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.buckets import CutOutput, PaddedInput
from edgert.errors import ConfigInvalid, SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import WantedBuckets, read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, at_length, load_source
from tests.support import models
from tests.support.models.texts import source_in


def load(proto: Any, folder: Path, buckets: str, *pads: str) -> SourceModel:
    return load_source(models.write(proto, folder / "m.onnx"), Conversion(buckets=read_buckets(buckets, pads)))


def test_the_sizes_are_sorted_and_the_pads_are_read() -> None:
    assert read_buckets("tokens=64,32,64", ["ids=1", "mask=-0.5"]) == WantedBuckets(
        "tokens", (32, 64), {"ids": 1.0, "mask": -0.5}
    )
    assert read_buckets(None) is None


@pytest.mark.parametrize(
    ("buckets", "pads"),
    [
        ("32,64", []),
        ("tokens=", []),
        ("tokens=0", []),
        ("tokens=a", []),
        (f"tokens={','.join(map(str, range(1, 30)))}", []),
        (f"tokens={2**25}", []),
        ("tokens=8", ["ids"]),
        ("tokens=8", ["ids=one"]),
        (None, ["ids=1"]),
    ],
)
def test_other_texts_are_refused_with_the_valid_form(buckets: str | None, pads: list[str]) -> None:
    with pytest.raises(ConfigInvalid, match=r"give|needs --buckets"):
        read_buckets(buckets, pads)


def test_every_input_with_the_axis_is_padded_and_every_output_with_the_axis_is_cut() -> None:
    source = source_in("tokens=8,16", "ids=3")
    assert [spec.shape for spec in source.inputs] == [(-1, -1), (-1, -1)]
    assert [spec.shape for spec in source.outputs] == [(-1, 4), (-1, -1, 16)]
    assert source.buckets is not None
    assert source.buckets.inputs == (PaddedInput("ids", 1, 3.0), PaddedInput("mask", 1))
    assert source.buckets.outputs == (CutOutput("states", 1),)
    fixed = at_length(source, 8)
    assert fixed.buckets is None
    assert [spec.shape for spec in (*fixed.inputs, *fixed.outputs)] == [(-1, 8), (-1, 8), (-1, 4), (-1, 8, 16)]


@pytest.mark.parametrize("name", ["?", ""])
def test_an_axis_without_a_name_is_given_by_input_and_position(name: str, tmp_path: Path) -> None:
    body = """
        s = ReduceMean <axes = [2], keepdims = 0> (x)
        t = Transpose <perm = [0, 2, 1]> (s)
        y = MatMul (t, w)
    """
    proto = models.model("float[N,3,8,W] x) => (float[N,W,2] y", body, {"w": models.random(3, 2)})
    proto.graph.input[0].type.tensor_type.shape.dim[3].dim_param = name
    with pytest.raises(SourceInvalid, match=r"--input x=1,3,8,LENGTH3, or some lengths: --buckets x:3=32,64,128"):
        load_source(models.write(proto, tmp_path / "open.onnx"))
    source = load(proto, tmp_path, "x:3=16,32")
    assert source.inputs == (TensorSpec("x", "FP32", (-1, 3, 8, -1)),)
    assert source.outputs[0].shape == (-1, -1, 2)


def test_an_output_with_a_fourth_of_the_elements_is_cut_to_a_fourth_of_the_length(tmp_path: Path) -> None:
    body = "y = MaxPool <kernel_shape = [4], strides = [4], ceil_mode = 1> (x)"
    source = load(models.model("float[N,2,T] x) => (float[N,2,U] y", body), tmp_path, "T=8,32")
    assert source.buckets is not None
    assert source.buckets.outputs == (CutOutput("y", 2, 4),)


def test_an_output_that_no_fraction_describes_is_refused(tmp_path: Path) -> None:
    body = "y = MaxPool <kernel_shape = [3]> (x)"
    with pytest.raises(SourceInvalid, match="not 'T' divided by a whole number: 30 for 32, 29 for 31, 6 for 8"):
        load(models.model("float[N,2,T] x) => (float[N,2,U] y", body), tmp_path, "T=8,32")


def test_a_length_that_the_model_does_not_run_at_is_refused(tmp_path: Path) -> None:
    body = "y = Reshape (x, shape)"
    proto = models.model("float[N,T] x) => (float[N,2,U] y", body, {"shape": np.array([0, 2, -1])})
    with pytest.raises(SourceInvalid, match="does not run"):
        load(proto, tmp_path, "T=8,16")


@pytest.mark.parametrize(
    ("buckets", "pads", "says"),
    [
        ("words=8", (), r"no input leaves an axis of that name open.*ids \[batch, tokens\]"),
        ("batch=8", (), "no input leaves"),
        ("ids:0=8", (), "no input leaves"),
        ("tokens=8", ("scores=1",), "--pad scores: only inputs with axis 'tokens' are padded: ids, mask"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_of_the_model(buckets: str, pads: tuple[str, ...], says: str) -> None:
    with pytest.raises(SourceInvalid, match=says):
        source_in(buckets, *pads)


def test_a_second_open_axis_still_needs_a_length(tmp_path: Path) -> None:
    proto = models.model("float[N,T,K] x) => (float[N,T,K] y", "y = Relu (x)")
    with pytest.raises(SourceInvalid, match=r"axis 2 of input 'x'.*is open"):
        load(proto, tmp_path, "T=8,16")
