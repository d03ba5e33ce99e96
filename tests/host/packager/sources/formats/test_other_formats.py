"""The error for a file of an unsupported format names the format and the file to give instead.

No framework is needed.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.formats.other_formats import TORCH_PICKLE, other_format
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

HDF5 = b"\x89HDF\r\n\x1a\n"


def zipped(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return data.getvalue()


def tarred() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("model.onnx"))
    return data.getvalue()


def arrays() -> bytes:
    data = io.BytesIO()
    np.savez(data, w=np.zeros(3))
    return data.getvalue()


FILES = {
    "net.pth": (zipped("net/data.pkl", "net/data/0"), r"pickled PyTorch.*torch\.export\.save"),
    "net.pth.tar": (zipped("net/data.pkl"), "pickled PyTorch"),
    "compiled.pt2": (zipped("m/data/aotinductor/model/a.so", "m/archive_format"), r"AOTInductor.*torch\.export\.save"),
    "packaged.pt": (
        zipped("m/.data/ts_code/0/constants.pkl", "m/.data/ts_code/code/x.py", "m/.data/extern_modules"),
        r"torch\.package.*torch\.export\.save",
    ),
    "old.pt": (TORCH_PICKLE + bytes(20), "pickled PyTorch"),
    "model.joblib": (pickle.dumps({"a": 1}), "skl2onnx"),
    "packed.joblib": (b"x\x9c" + bytes(20), "skl2onnx"),
    "model.pkl": (pickle.dumps({"a": 1}, 2), "skl2onnx"),
    "forest.txt": (b"tree\nversion=v4\nnum_class=1\n", "LightGBM.*onnxmltools"),
    "forest.json": (json.dumps({"learner": {"attributes": {}}}).encode(), "XGBoost.*onnxmltools"),
    "forest.ubj": (b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner{", "XGBoost"),
    "forest.cbm": (b"CBM1" + bytes(20), r"CatBoost.*format='onnx'"),
    "net.json": (b'{"class_name": "Functional", "config": {}}', "a Keras file with layers and without weights"),
    "net.weights.h5": (HDF5 + b"layer_names", r"a Keras file with weights and without layers.*model\.save"),
    "net.ort": (b"\x18\x00\x00\x00ORTM" + bytes(20), "ONNX Runtime's own format"),
    "net.mlmodel": (b"\x08\x01\x12\x02", "Core ML"),
    "inference.pdmodel": (b"\n\xa0\x10", "paddle2onnx"),
    "inference.json": (b'{"base_code":{"magic":"pir","version":3},"program":{}}', "paddle2onnx"),
    "net.xml": (b'<?xml version="1.0"?>\n<net name="a" version="11">', "OpenVINO's own format"),
    "lid.ftz": (b"\xba\x16\x4f\x2f\x0c", "fastText, which no engine"),
    "net.gguf": (b"GGUF\x03", "GGUF"),
    "net.safetensors": (b"\x40" + bytes(7) + b"{}", "weights without a model"),
    "net.tar.gz": (tarred(), "unpack it"),
    "net.zip": (zipped("net/saved_model.pb", "net/variables/variables.index"), "unpack it"),
    "half.keras": (zipped("config.json", "model.weights.h5")[:40], r"cannot be read, .* download it again"),
    "empty.onnx": (b"", r"is empty, .* download it again"),
    "page.onnx": (b"<!DOCTYPE html><html><body>404", "web page"),
    "hand.task": (zipped("a.tflite", "b.tflite"), r"holds a\.tflite, b\.tflite: unpack it"),
    "weights.npz": (arrays(), "NumPy arrays"),
    "saved_model.pb": (b"\x08\x01\x12", "give the folder of the SavedModel"),
    "ckpt-1.index": (bytes(20), "a checkpoint of TensorFlow"),
    "net.jax": (b"\x3c\x00\x00\x00" + bytes(300) + b"ML\xefR\x0dStableHLO_v1.15.0", r"StableHLO.*jax2onnx\.to_onnx"),
    "net.mlir": (b"#loc = loc(unknown)\nmodule @jit_f", "StableHLO, which no engine"),
    "net.msgpack": (b"\x82\xa6params", r"weights of JAX without a model.*jax2onnx"),
    "net.eqx": (b"\x93NUMPY\x01\x00", "weights of JAX without a model"),
    "frozen.pb": (b"\n\x1f\n\x05input", "--graphdef frozen.pb --inputs INPUT:0 --outputs OUTPUT:0 --output"),
    "frozen.pbtxt": (b'node {\n  name: "x"\n', "TensorFlow 1 as text: .*as_text=False"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_refusal_of_each_file_names_the_file_to_give_instead(name: str, tmp_path: Path) -> None:
    data, says = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceInvalid, match=says) as raised:
        load_source(tmp_path / name)
    assert raised.value.message.startswith(f"{name} is ")


def test_the_folder_of_a_core_ml_model_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "net.mlpackage"
    folder.mkdir()
    with pytest.raises(SourceInvalid, match=r"net\.mlpackage is a Core ML model, .* as ONNX"):
        load_source(folder)


def test_the_folder_of_a_tensorflow_checkpoint_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for name in ("checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (folder / name).touch()
    with pytest.raises(SourceInvalid, match=r"ckpt is a checkpoint of TensorFlow, .* model\.export\('folder'\)"):
        load_source(folder)
    (tmp_path / "saved_model.pb").touch()
    assert other_format(folder) == f"ckpt is a part of a SavedModel: give {tmp_path}"
    (folder / "saved_model.pb").touch()
    assert other_format(folder) == ""


@pytest.mark.parametrize("step", ["", "7", "7/default"])
def test_the_folder_of_an_orbax_checkpoint_is_named(step: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt" / step).mkdir(parents=True)
    (tmp_path / "ckpt" / step / "manifest.ocdbt").touch()
    with pytest.raises(SourceInvalid, match=r"ckpt is weights of JAX without a model.*jax2onnx"):
        load_source(tmp_path / "ckpt")


def test_a_saved_model_of_jax_is_refused_before_tensorflow_starts(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01\x12 main \x0dXlaCallModule")
    with pytest.raises(SourceInvalid, match=r"a SavedModel that JAX wrote.*the \.keras file.*jax2onnx"):
        load_source(tmp_path)


def test_a_file_that_can_be_built_gets_no_message(tmp_path: Path) -> None:
    """This includes a model with the suffix of another format, such as .pb in the early days of ONNX."""
    assert other_format(models.write(models.mlp(), tmp_path / "model.pb")) == ""
    for name, data in {
        "net.pt": zipped("m/constants.pkl", "m/code/x.py", "m/data.pkl"),
        "net.pt2": zipped("net/data/weights/weight_0"),
        "net.keras": zipped("config.json", "model.weights.h5"),
        "net.h5": HDF5 + b"model_config",
    }.items():
        (tmp_path / name).write_bytes(data)
        assert other_format(tmp_path / name) == ""
    assert other_format(tmp_path) == other_format(tmp_path / "missing") == ""
