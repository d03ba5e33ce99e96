"""Models of other frameworks are recognized by their content, and the framework's own exporter converts them.

The conversions run only if EDGERT_TORCH_PYTHON or EDGERT_KERAS_PYTHON names a Python with the framework.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import ConfigInvalid, SourceInvalid
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import load_samples
from edgert_deploy.packager.sources.formats.convert import Conversion, digest_and_size, framework_of, read_inputs
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, b"")
    return path


def test_the_framework_is_recognized_by_the_content_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(8))
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04" + bytes(50))
    found = {
        "saved": framework_of(tmp_path / "saved"),
        "h5": framework_of(tmp_path / "a.h5"),
        "keras": framework_of(archive(tmp_path / "a.bin", "metadata.json", "config.json", "model.weights.h5")),
        "script": framework_of(archive(tmp_path / "b.bin", "m/data.pkl", "m/code/x.py", "m/constants.pkl")),
        "export": framework_of(archive(tmp_path / "c.pt2", "net/data/weights/weight_0")),
        "zip": framework_of(archive(tmp_path / "d.zip", "x.txt")),
        "bad": framework_of(tmp_path / "bad.zip"),
        "folder": framework_of(tmp_path),
        "missing": framework_of(tmp_path / "missing"),
        "onnx": framework_of(models.write(models.mlp(), tmp_path / "m.onnx")),
    }
    torch, keras = ("script", "export"), ("saved", "h5", "keras")
    assert {name: kind for name, kind in found.items() if kind} == {
        **dict.fromkeys(torch, "torch"),
        **dict.fromkeys(keras, "keras"),
    }


@pytest.mark.parametrize("framework", ["keras", "torch"])
@pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("torch", "tensorflow"))), reason="a framework is installed in this Python"
)
def test_the_error_about_a_missing_framework_names_the_extra(framework: str, tmp_path: Path) -> None:
    names = {"keras": ("config.json", "model.weights.h5"), "torch": ("m/constants.pkl", "m/code/x.py")}[framework]
    path = archive(tmp_path / "model.bin", *names)
    with pytest.raises(ConfigInvalid, match=rf"pip install 'edgert\[{framework}\]'.*--convert-with"):
        load_source(path)


@pytest.mark.parametrize(("code", "is_advised"), [(3, False), (5, True)])
def test_the_general_next_step_does_not_follow_a_special_one(code: int, is_advised: bool, tmp_path: Path) -> None:
    python, path = tmp_path / "python", archive(tmp_path / "m.bin", "config.json", "model.weights.h5")
    python.write_text(f"#!/bin/sh\nprintf '\\033[96mthe\\033[0m reason.' >&2\nexit {code}\n")
    python.chmod(0o755)
    with pytest.raises(SourceInvalid, match=r"could not convert .* to ONNX: the reason") as raised:
        load_source(path, Conversion(str(python)))
    assert raised.value.message.endswith("the reason") == is_advised
    assert ("Export the model as ONNX yourself" in raised.value.message) != is_advised


def test_the_error_names_a_python_that_cannot_run(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.bin", "config.json", "model.weights.h5")
    with pytest.raises(ConfigInvalid, match="cannot run /nowhere/python"):
        load_source(path, Conversion("/nowhere/python"))


def test_a_conversion_is_reused_until_something_that_influences_it_changes(tmp_path: Path) -> None:
    """A stand-in for the Python of a framework counts its conversions."""
    models.write(models.mlp(), tmp_path / "made.onnx")
    python, calls, versions = tmp_path / "python", tmp_path / "calls", tmp_path / "versions"
    python.write_text(
        f"#!{sys.executable}\nimport json, shutil, sys\n"
        f"if sys.argv[2] == '-c':\n    print(open({str(versions)!r}).read())\n"
        f"else:\n    shutil.copy({str(tmp_path / 'made.onnx')!r}, json.loads(sys.argv[3])['out'])\n"
        f"    open({str(calls)!r}, 'a').write('x')\n"
    )
    python.chmod(0o755)
    versions.write_text("keras 3")
    path = archive(tmp_path / "model.keras", "config.json", "model.weights.h5")
    cache, lines = FileCache(tmp_path / "cache"), list[str]()

    def conversions(**more: Any) -> int:
        """Load the model; return the number of conversions so far."""
        assert load_source(path, Conversion(str(python), progress=lines.append, **more)).inputs[0].name == "x"
        assert lines == ["keras: converting model.keras to ONNX"] * len(lines)
        assert len(calls.read_text()) == len(lines)
        return len(lines)

    assert [conversions(cache=cache) for _ in range(3)] == [1, 1, 1]
    assert conversions() == 2
    versions.write_text("keras 4")
    assert [conversions(cache=cache) for _ in range(2)] == [3, 3]
    archive(path, "config.json", "model.weights.h5", "metadata.json")
    assert [conversions(cache=cache) for _ in range(2)] == [4, 4]
    for file in cache.folder.glob("*/model.onnx"):
        file.write_bytes(file.read_bytes()[:-1])
    assert [conversions(cache=cache) for _ in range(2)] == [5, 5]


def test_examples_of_inputs_are_read_or_refused() -> None:
    assert read_inputs(["x=1,3,8,8", "ids=int64:1,16"]) == {
        "x": {"datatype": "float32", "shape": [1, 3, 8, 8]},
        "ids": {"datatype": "int64", "shape": [1, 16]},
    }
    numbers = {"0.5": 0.5, "-1": -1, ".25": 0.25, "1e-3": 0.001, "16000": 16000, "true": True}
    for text, number in numbers.items():
        assert read_inputs([f"x={text}"])["x"]["shape"] == [number]
    for text in ("x", "x=", "x=1,a", "x=0.5,2", "x=--1", "x=1.", "x=text:1,2", "=1,2"):
        with pytest.raises(ConfigInvalid, match="--input"):
            read_inputs([text])


def test_the_digest_of_a_folder_covers_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    one = digest_and_size(tmp_path)
    (tmp_path / "b").write_bytes(b"2")
    assert digest_and_size(tmp_path)[1] == 2
    assert digest_and_size(tmp_path)[0] != one[0]


TORCH = """
import numpy, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.b, self.f = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 5)
    def forward(self, x):
        return self.f(torch.relu(self.b(self.c(x))).mean((2, 3)))
torch.manual_seed(0)
net, x = Net().eval(), torch.randn(12, 3, 16, 16)
dynamic = {"x": {0: torch.export.Dim("batch", min=1, max=1024)}}
torch.export.save(torch.export.export(net, (x,), dynamic_shapes=dynamic), "net.pt2")
torch.jit.script(net).save("net.pt")
class Named(torch.nn.Module):
    def forward(self, x):
        return {"scores": x.mean((2, 3)), "none": None, "boxes": x * 2}
torch.export.save(torch.export.export(Named(), (x,), dynamic_shapes=dynamic), "named.pt2")
torch.save(net, "pickled.pth")
numpy.savez("x.npz", x=x.numpy())
numpy.save("y.npy", net(x).detach().numpy())
"""

KERAS = """
import numpy, keras
keras.utils.set_random_seed(0)
image = keras.Input((16, 16, 3), name="x")
h = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, padding="same")(image))
h = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(h))
net = keras.Model(image, keras.layers.Dense(5, activation="softmax", name="scores")(h))
net.save("net.keras"); net.save("net.h5"); net.export("saved", verbose=False)
x = numpy.random.default_rng(0).standard_normal((12, 16, 16, 3)).astype("f4")
numpy.savez("x.npz", x=x)
numpy.save("y.npy", net(x).numpy())
kinds = [keras.layers.Conv2D(8, 3, activation="gelu"), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5, name="last")]
sequential = keras.Sequential([keras.Input((16, 16, 3), name="x"), *kinds])
sequential.save("sequential.keras"); sequential.save("sequential.h5")
numpy.save("z.npy", sequential(x).numpy())
normalization = keras.layers.Normalization()
normalization.adapt(x * [1, 10, 100] + 5)
adapted = keras.Sequential([keras.Input((16, 16, 3), name="x"), normalization, keras.layers.Flatten(), keras.layers.Dense(5)])
adapted.save("adapted.keras"); adapted.export("adapted", verbose=False)
numpy.save("n.npy", adapted(x).numpy())
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal")
    def call(self, x):
        return x * self.scale
own = keras.Sequential([keras.Input((16, 16, 3), name="x"), Scale(), keras.layers.Flatten(), keras.layers.Dense(5)])
own.save("own.keras"); own.export("own", verbose=False)
numpy.save("o.npy", own(x).numpy())
steps = keras.Input((None, 4), name="steps")
keras.Model(steps, keras.layers.Conv1D(2, 3, padding="same")(steps)).save("open.keras")
image = keras.Input((None, None, 3), name="image")
keras.Model(image, keras.layers.UpSampling2D(interpolation="bilinear")(image)).save("upsampling.keras")
text = keras.Input((), dtype="string", name="text")
keras.Model(text, keras.layers.Embedding(9, 4)(keras.layers.Hashing(num_bins=9)(text))).save("text.keras")
lambda_model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda v: v * 2)])
lambda_model.save("lambda.keras"); lambda_model.save("lambda.h5")
image = keras.Input((16, 16, 3), name="x")
flat = keras.layers.Flatten()(keras.layers.Conv2D(6, 3, groups=3)(image))  # Keras compiles a convolution with groups
named = keras.Model(image, {"scores": keras.layers.Dense(5)(flat), "boxes": keras.layers.Dense(4)(flat)})
named.save("named.keras")
numpy.savez("named.npz", **{name: value.numpy() for name, value in named(x).items()})
layers = [keras.Input((16, 16, 3), name="x"), keras.layers.Reshape((16, 48))]
layers += [keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True)), keras.layers.GRU(3)]
recurrent = keras.Sequential(layers)
recurrent.save("recurrent.keras"); numpy.save("r.npy", recurrent(x).numpy())
steps = keras.Input((16, 48), name="x")
states = keras.Model(steps, keras.layers.LSTM(4, return_sequences=True, return_state=True, name="lstm")(steps))
states.save("states.keras")
steps = keras.Input((16, 48), batch_size=1, name="x")
keras.Model(steps, keras.layers.Bidirectional(keras.layers.LSTM(4, stateful=True, name="lstm"))(steps)).save("stateful.keras")
keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Resizing(8, 8, interpolation="area")]).save("area.keras")
import tensorflow
@tensorflow.function(input_signature=[tensorflow.TensorSpec([None, 16, 16, 3], name="x"), tensorflow.TensorSpec([], name="limit")])
def above(x, limit):
    return {"y": tensorflow.cast(x > limit, tensorflow.float32)}
module = tensorflow.Module()
tensorflow.saved_model.save(module, "one", signatures={"above": above})
tensorflow.saved_model.save(module, "two", signatures={"above": above, "again": above})
numpy.save("above.npy", above(x, 0.25)["y"].numpy())
"""


def python_with(framework: str) -> str:
    name = f"EDGERT_{framework.upper()}_PYTHON"
    python = os.environ.get(name, sys.executable)
    module = {"torch": "torch", "keras": "tensorflow"}[framework]
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {framework} in this Python; {name} names none that has it")
    return python


@pytest.fixture(scope="module")
def torch_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    python, folder = python_with("torch"), tmp_path_factory.mktemp("torch")
    (folder / "make.py").write_text(TORCH)  # TorchScript reads the class's source
    subprocess.run([python, "make.py"], cwd=folder, check=True, capture_output=True)
    return python, folder


@pytest.fixture(scope="module")
def keras_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    python, folder = python_with("keras"), tmp_path_factory.mktemp("keras")
    subprocess.run([python, "-c", KERAS], cwd=folder, check=True, capture_output=True)
    return python, folder


def check_answers(path: Path, how: Conversion, answers: str = "y.npy") -> None:
    source = load_source(path, how)
    assert (source.inputs[0].name, source.inputs[0].shape[0], len(source.outputs)) == ("x", -1, 1)
    assert source.sha256 == digest_and_size(path)[0]
    samples = load_samples(path.parent / "x.npz", source, at_least=10)
    want = np.load(path.parent / answers)
    np.testing.assert_allclose(reference_outputs(source, samples)[0], want, atol=1e-5)
    assert str(path.parent).encode() not in source.proto.SerializeToString()


def test_models_from_torch_export_and_from_torchscript_give_the_answers_of_the_module(
    torch_models: tuple[str, Path],
) -> None:
    python, folder = torch_models
    check_answers(folder / "net.pt2", Conversion(python))
    source = load_source(folder / "net.pt2", Conversion(python))
    assert source.model_bytes == source.converted_bytes != source.size_bytes, "the file holds the example's data, too"
    named = load_source(folder / "named.pt2", Conversion(python))
    assert [(spec.name, spec.shape) for spec in named.outputs] == [("scores", (-1, 3)), ("boxes", (-1, 3, 16, 16))]
    check_answers(folder / "net.pt", Conversion(python, read_inputs(["x=1,3,16,16"])))
    with pytest.raises(SourceInvalid, match=r"--input NAME=1,3,224,224.*its inputs: x; given: none"):
        load_source(folder / "net.pt", Conversion(python))
    with pytest.raises(SourceInvalid, match=r"pickled.*torch\.export\.save"):
        load_source(folder / "pickled.pth", Conversion(python))


@pytest.mark.parametrize("name", ["net.keras", "net.h5", "saved"])
def test_models_from_keras_and_from_saved_models_give_the_answers_of_the_model(
    name: str, keras_models: tuple[str, Path]
) -> None:
    python, folder = keras_models
    check_answers(folder / name, Conversion(python))


@pytest.mark.parametrize("name", ["sequential.keras", "sequential.h5"])
def test_a_converted_sequential_model_with_gelu_gives_the_answers_of_the_model(
    name: str, keras_models: tuple[str, Path]
) -> None:
    """A Sequential model has no output names, and tf2onnx writes an operator that ONNX lacks."""
    python, folder = keras_models
    check_answers(folder / name, Conversion(python), "z.npy")
    assert load_source(folder / name, Conversion(python)).outputs[0].name == "last"


@pytest.mark.parametrize("name", ["adapted.keras", "adapted"])
def test_a_converted_adapted_normalization_gives_the_answers_of_the_model(
    name: str, keras_models: tuple[str, Path]
) -> None:
    python, folder = keras_models
    check_answers(folder / name, Conversion(python), "n.npy")


def test_recurrent_layers_of_a_keras_file_are_unrolled(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    check_answers(folder / "recurrent.keras", Conversion(python), "r.npy")
    source = load_source(folder / "recurrent.keras", Conversion(python))
    assert not {"If", "Loop", "Scan"} & {node.op_type for node in source.proto.graph.node}


def test_the_error_about_a_class_of_the_user_names_the_class_and_a_workaround(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    with pytest.raises(
        SourceInvalid, match=r"Scale is not a part of Keras.*model\.export\('folder'\).* build that folder$"
    ):
        load_source(folder / "own.keras", Conversion(python))
    check_answers(folder / "own", Conversion(python), "o.npy")


def test_a_keras_file_that_holds_python_code_is_refused(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    for name in ("lambda.keras", "lambda.h5"):
        with pytest.raises(SourceInvalid, match=r"a Lambda layer.* build that folder$"):
            load_source(folder / name, Conversion(python))


def test_a_keras_model_that_takes_text_gets_the_next_step(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    with pytest.raises(SourceInvalid, match=r"text takes text, .* its input is numbers; docs/text\.md"):
        load_source(folder / "text.keras", Conversion(python))


def test_an_open_length_of_a_keras_model_is_given_with_the_usual_option(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    with pytest.raises(SourceInvalid, match=r"axis 1 of input 'steps' .* is open"):
        load_source(folder / "open.keras", Conversion(python))
    source = load_source(folder / "open.keras", Conversion(python, read_inputs(["steps=1,32,4"])))
    assert (source.inputs[0].shape, source.outputs[0].shape) == ((-1, 32, 4), (-1, 32, 2))
    with pytest.raises(SourceInvalid, match="give the lengths of these axes with --input image=1,LENGTH,LENGTH,3"):
        load_source(folder / "upsampling.keras", Conversion(python))
    source = load_source(folder / "upsampling.keras", Conversion(python, read_inputs(["image=1,16,24,3"])))
    assert source.outputs[0].shape == (-1, 32, 48, 3)


def test_each_output_of_a_keras_model_keeps_its_own_name(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    source = load_source(folder / "named.keras", Conversion(python))
    samples = load_samples(folder / "x.npz", source, at_least=10)
    with np.load(folder / "named.npz") as want:
        for spec, answers in zip(source.outputs, reference_outputs(source, samples), strict=True):
            np.testing.assert_allclose(answers, want[spec.name], atol=1e-5)
    states = load_source(folder / "states.keras", Conversion(python))
    assert [spec.name for spec in states.outputs] == ["lstm_0", "lstm_1", "lstm_2"]


def test_a_keras_model_whose_answers_would_change_is_refused(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    with pytest.raises(SourceInvalid, match=r"lstm.* keeps its state .*docs/streams\.md"):
        load_source(folder / "stateful.keras", Conversion(python))
    with pytest.raises(SourceInvalid, match=r"ResizeArea of TensorFlow .* use bilinear"):
        load_source(folder / "area.keras", Conversion(python))


def test_the_only_signature_of_a_saved_model_is_converted_whatever_its_name(keras_models: tuple[str, Path]) -> None:
    python, folder = keras_models
    how = Conversion(python, read_inputs(["limit=0.25"]))
    check_answers(folder / "one", how, "above.npy")
    with pytest.raises(
        SourceInvalid, match=r"'serving_default' \(found: above, again\)\. .*signatures=module\.signatures\['above'\]"
    ):
        load_source(folder / "two", how)
