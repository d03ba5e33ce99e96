"""Weights in separate files are read completely, and only from files below the model's folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.source_model import load_source, reference_artifact

WEIGHTS = np.random.default_rng(5).normal(size=(16, 4)).astype(np.float32)


def write_model(folder: Path, data: str = "m.onnx.data") -> Path:
    """Write a model like torch.onnx.export: `m.onnx`, with its weights in `m.onnx.data`."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 16])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", inputs, outputs, [numpy_helper.from_array(WEIGHTS, "w")])  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder.mkdir(exist_ok=True)
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location=data, size_threshold=0)
    return folder / "m.onnx"


def relocate(path: Path, **entries: str) -> None:
    """Change the location, the offset or the length of the weights."""
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())


def test_weights_in_separate_files_are_read_into_the_model(tmp_path: Path) -> None:
    source = load_source(write_model(tmp_path / "a"))
    artifact = reference_artifact(source, tmp_path)
    (weight,) = onnx.load(artifact.path, load_external_data=False).graph.initializer
    assert weight.data_location == TensorProto.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(weight), WEIGHTS)
    assert source.size_bytes > WEIGHTS.nbytes


def test_other_weights_give_another_digest(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    before = load_source(path).sha256
    data = path.with_name("m.onnx.data")
    data.write_bytes(bytes(reversed(data.read_bytes())))
    changed = np.frombuffer(data.read_bytes(), np.float32)
    if not np.isfinite(changed).all():  # reversed bytes may be NaN
        data.write_bytes((WEIGHTS * 2).tobytes())
    assert load_source(path).sha256 != before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    path.with_name("m.onnx.data").unlink()
    with pytest.raises(SourceInvalid, match=r"m\.onnx\.data.*put that file beside the model"):
        load_source(path)


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "a/../../secret", ""])
def test_a_location_that_leads_out_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    path = write_model(tmp_path / "a")
    (tmp_path / "secret").write_bytes(b"x" * 1024)
    relocate(path, location=location)
    with pytest.raises(SourceInvalid, match="not a file below the model's folder"):
        load_source(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    (tmp_path / "secret").write_bytes(WEIGHTS.tobytes())
    data = path.with_name("m.onnx.data")
    data.unlink()
    data.symlink_to(tmp_path / "secret")
    with pytest.raises(SourceInvalid, match="leads out of the model's folder"):
        load_source(path)


def test_a_pipe_in_place_of_the_weights_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    data = path.with_name("m.onnx.data")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(SourceInvalid, match=r"not a regular file|cannot be read"):
        load_source(path)


@pytest.mark.parametrize("entries", [{"offset": "200"}, {"length": "100000"}, {"offset": "-1"}, {"length": "many"}])
def test_a_range_of_weights_beyond_the_end_of_the_file_is_refused(tmp_path: Path, entries: dict[str, str]) -> None:
    path = write_model(tmp_path / "a")
    relocate(path, **entries)
    with pytest.raises(SourceInvalid, match=r"beyond the end|is not valid ONNX"):
        load_source(path)


def test_weights_that_are_not_numbers_are_refused_as_such(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    broken = WEIGHTS.copy()
    broken[0, 0] = np.nan
    path.with_name("m.onnx.data").write_bytes(broken.tobytes())
    with pytest.raises(SourceInvalid, match="weight 'w' is NaN or infinite in 1 of 64 values"):
        load_source(path)
