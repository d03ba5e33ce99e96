"""Recognizes files of formats that `edgert build` does not support and gives advice.

A file is recognized by its first bytes if possible, else by its suffix. The check needs no framework and unpickles
nothing.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

from edgert.printable import some_of
from edgert_deploy.packager.sources.formats.convert import HDF5_MAGIC, ZIP_MAGIC, framework_of, names_in_zip

HEAD_BYTES = 65536
NAMES_MAX = 4  # a message lists at most this many models of an archive
# The first bytes of a file that torch.save wrote before 2020.
TORCH_PICKLE = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

EXPORT = "torch.export.save(torch.export.export(model.eval(), (one_sample,)), 'model.pt2'), where one_sample has a batch of 1"
PICKLED_TORCH = (
    "a pickled PyTorch module, or weights without a model, and reading it would run Python code. Load it with the "
    f"program that made it, save the model with {EXPORT}, and give that file"
)
PACKAGED_TORCH = (
    "an archive of torch.package, and reading it would run Python code. Load it with the program that made it, save the "
    f"model in it with {EXPORT}, and give that file"
)
COMPILED_TORCH = f"a PyTorch model that AOTInductor compiled for one kind of processor: save the model with {EXPORT}"
PICKLE = (
    "a Python pickle, and reading it would run Python code. Load it with the program that made it, and convert the model "
    "to ONNX: a scikit-learn model with skl2onnx, a LightGBM or XGBoost model with onnxmltools"
)
BOOSTER = "a model of {}: convert it to ONNX with onnxmltools"
CATBOOST = "a model of CatBoost: write it with model.save_model('model.onnx', format='onnx'), and give that file"
CORE_ML = "a Core ML model, for Apple's devices only: export the model that it was made from as ONNX"
PADDLE = "a PaddlePaddle model or its weights: convert it with paddle2onnx, and give the ONNX model"
KERAS_PART = (
    "a Keras file with {} and without {}: build the model in Keras, load its weights, and give what "
    "model.save('model.keras') writes"
)
CHECKPOINT = (
    "a checkpoint of TensorFlow, which holds weights without a model: build the model in TensorFlow, load these weights, "
    "save it with model.export('folder'), and give that folder"
)
NO_GRAPH = "weights without a model: export the model itself as ONNX, with these weights"
JAX_TO_ONNX = (
    "convert the JAX function to ONNX, for example with jax2onnx.to_onnx(function, [('B', 32, 32, 3)], "
    "return_mode='file', output_path='model.onnx'), and give that file"
)
STABLEHLO = f"a program in StableHLO, which no engine of EdgeRT runs: {JAX_TO_ONNX}"
JAX_WEIGHTS = f"weights of JAX without a model: load them in JAX; then {JAX_TO_ONNX}"
# A checkpoint of Orbax, and the folder of its CheckpointManager, which has a folder for each step.
ORBAX = ("manifest.ocdbt", "*/manifest.ocdbt", "*/*/manifest.ocdbt")
JAX_SAVED_MODEL = (
    "a SavedModel that JAX wrote, whose StableHLO program tf2onnx cannot convert to ONNX: give the .keras file if Keras "
    f"with the JAX backend exported the folder; otherwise {JAX_TO_ONNX}"
)
ARCHIVE = "a packed archive: unpack it, and give the model's file"
INCOMPLETE = "{}, so its copy or download is not complete: copy or download it again"
WEB_PAGE = "a web page, not a model: the download failed, or needs a login. Download it again"
# The formats that are recognized by the first bytes of the file.
BEGINNINGS = {
    TORCH_PICKLE: PICKLED_TORCH,
    b"tree\nversion=": BOOSTER.format("LightGBM"),
    b"CBM1": CATBOOST,
    b"GGUF": "a language model in GGUF, which no engine of EdgeRT runs",
    b"\xba\x16\x4f\x2f": "a model of fastText, which no engine of EdgeRT runs",
    b"\x1f\x8b": ARCHIVE,
    b"BZh": ARCHIVE,
    b"\xfd7zXZ\x00": ARCHIVE,
    b"<!DOCTYPE html": WEB_PAGE,
    b"<!doctype html": WEB_PAGE,
    b"\x93NUMPY": "an array of NumPy, not a model; give samples with --calibration and --holdout",
    **{bytes((0x80, version)): PICKLE for version in range(2, 6)},
}
# The formats that are recognized by the suffix of the file, if its content is not recognized.
SUFFIXES = {
    ".joblib": PICKLE,
    ".pkl": PICKLE,
    ".mlmodel": CORE_ML,
    ".mlpackage": CORE_ML,  # a folder
    ".pdmodel": PADDLE,
    ".pdiparams": PADDLE,
    ".engine": "a plan of TensorRT, for one GPU only: give the ONNX model that it was made from",
    ".plan": "a plan of TensorRT, for one GPU only: give the ONNX model that it was made from",
    ".index": CHECKPOINT,
    ".caffemodel": "a Caffe model: convert it to ONNX first",
    ".safetensors": NO_GRAPH,
    ".msgpack": JAX_WEIGHTS,  # Flax
    ".mlir": STABLEHLO,
}


def other_format(path: Path) -> str:
    """Return a message if the file has an unsupported format; otherwise an empty text."""
    if path.is_dir():
        what = SUFFIXES.get(path.suffix.lower(), "") or _of_folder(path)
        return f"{path.name} is {what}" if what else ""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        what = _by_content(path, head) or SUFFIXES.get(path.suffix.lower(), "")
        return f"{path.name} is {what}" if what else ""
    return ""


def _of_folder(path: Path) -> str:
    if (graph := path / "saved_model.pb").is_file():
        return JAX_SAVED_MODEL if _holds(graph, b"XlaCallModule") else ""
    if any(file for pattern in ORBAX for file in path.glob(pattern)):
        return JAX_WEIGHTS
    if not any(path.glob("*.index")):
        return ""
    parent = path.resolve().parent
    return f"a part of a SavedModel: give {parent}" if (parent / "saved_model.pb").is_file() else CHECKPOINT


def _by_content(path: Path, head: bytes) -> str:
    if not head:
        return INCOMPLETE.format("empty")
    if head.startswith(ZIP_MAGIC):
        return _of_zip(path)
    if head[4:8] == b"ORTM":
        return "in ONNX Runtime's own format, made for one kind of processor: give the ONNX model that it was made from"
    if head.startswith(HDF5_MAGIC):
        return "" if _holds(path, b"model_config") else KERAS_PART.format("weights", "layers")
    if head[:1] == b"{":
        return _of_json(head)
    if b"StableHLO_v" in head:  # MLIR's byte code, and jax.export's file around it
        return STABLEHLO
    if path.suffix == ".eqx":  # arrays of NumPy
        return JAX_WEIGHTS
    if head.startswith(b"<?xml") and b"<net " in head:
        return "in OpenVINO's own format: give the ONNX model that it was made from"
    if path.name == "saved_model.pb":
        return "one file of a SavedModel: give the folder of the SavedModel"
    if path.suffix == ".pb" and head[:1] == b"\n":
        # Field 1, which comes first, holds bytes in a GraphDef, and a number in an ONNX model.
        return (
            f"a graph of TensorFlow 1: convert it with python -m tf2onnx.convert --graphdef {path.name} --inputs INPUT:0 "
            "--outputs OUTPUT:0 --output model.onnx, with the names of your inputs and outputs, and give model.onnx"
        )
    if path.suffix in (".pb", ".pbtxt") and head.lstrip().startswith(b"node {"):
        return (
            "a graph of TensorFlow 1 as text: write it with tensorflow.io.write_graph(graph, '.', 'graph.pb', "
            "as_text=False), convert graph.pb to ONNX with tf2onnx, and give the ONNX model"
        )
    return next((what for beginning, what in BEGINNINGS.items() if head.startswith(beginning)), "")


def _of_zip(path: Path) -> str:
    names = names_in_zip(path)
    if names is None:
        return INCOMPLETE.format("a ZIP archive that cannot be read")
    if names and all(name.endswith(".npy") for name in names):
        return "NumPy arrays, not a model; give samples with --calibration and --holdout"
    if any(name.endswith("/.data/extern_modules") for name in names):
        return PACKAGED_TORCH
    is_script = any("/code/" in name for name in names) and any(name.endswith("/constants.pkl") for name in names)
    if not is_script and any(name.endswith("/data.pkl") for name in names):
        return PICKLED_TORCH
    if any("/aotinductor/" in name for name in names):
        return COMPILED_TORCH
    models = [name for name in names if name.endswith((".onnx", ".tflite"))]
    if models:
        return f"an archive that holds {some_of(models, NAMES_MAX)}: unpack it, and give one of them"
    return "" if framework_of(path) else ARCHIVE


def _of_json(head: bytes) -> str:
    if b"learner" in head:  # this key is in XGBoost's JSON and in its binary JSON
        return BOOSTER.format("XGBoost")
    if b'"pir"' in head:  # the format of PaddlePaddle 3
        return PADDLE
    if b'"class_name"' in head:
        return KERAS_PART.format("layers", "weights")
    return ""


def _holds(path: Path, text: bytes) -> bool:
    if not path.stat().st_size:  # mmap refuses an empty file
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0
