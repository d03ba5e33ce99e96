"""A new model file has the settings that the model implies: kinds of inputs, classes, likely processing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.model_file import read_model_file
from edgert_deploy.packager.new_model_file import model_file_text, name_from, write_model_file
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.models.texts import MODEL
from tests.support.paths import DIGITS

# A model of the ONNX project.
SHUFFLENET = Path(pytest.importorskip("onnx").__file__).parent / "backend/test/data/light/light_shufflenet.onnx"


def text_for(proto: Any, folder: Path) -> str:
    return model_file_text(load_source(models.write(proto, folder / "net.onnx")), {}, ["this-machine"])


def test_the_example_has_everything_that_a_build_needs(tmp_path: Path) -> None:
    for name in ("digits.onnx", "calibration.npz", "holdout.npz", "labels.txt", "preprocess.toml"):
        shutil.copy(DIGITS / name, tmp_path)
    path = write_model_file(load_source(tmp_path / "digits.onnx"), force=False)
    assert path == tmp_path / "digits.toml"
    text = path.read_text()
    assert "# input   image FP32 [N, 1, 8, 8]: an image, 1 channel, 8 x 8, layout nchw" in text
    assert "# output  scores FP32 [N, 10]: 10 classes" in text
    values = read_model_file(path)
    for key in ("model", "calibration", "holdout", "labels", "preprocess"):
        assert Path(values[key]).is_file(), key
    assert (values["name"], values["targets"], values["release"]) == ("digits", ["this-machine"], 1)


def test_a_model_from_elsewhere_is_recognized_as_an_image_classifier(tmp_path: Path) -> None:
    shutil.copy(SHUFFLENET, tmp_path / "Shuffle Net.onnx")
    path = write_model_file(load_source(tmp_path / "Shuffle Net.onnx"), force=False)
    text = path.read_text()
    assert "an image, 3 channels, 224 x 224, layout nchw" in text
    assert "1000 classes" in text
    assert "arrays gpu_0/data_0 [samples, 3, 224, 224]" in text
    assert "# labels" in text
    values = read_model_file(path)
    assert (values["name"], values["preprocess"]) == ("shuffle-net", "imagenet")


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "net.onnx"))
    path = write_model_file(source, force=False)
    path.write_text("mine")
    with pytest.raises(ConfigInvalid, match="--force"):
        write_model_file(source, force=False)
    assert path.read_text() == "mine"
    write_model_file(source, force=True)
    assert "net.onnx" in path.read_text()


def test_the_model_file_describes_each_kind_of_input(tmp_path: Path) -> None:
    features = text_for(models.mlp(), tmp_path)
    assert "x FP32 [N, 4]: features, 4 a sample" in features
    assert "preprocess" not in features
    assert "or of WAV or CSV recordings (docs/signals.md)" in features
    tokens = models.model("int64[N,16] ids) => (float[N,16] y", "y = Cast <to = 1> (ids)")
    text = text_for(tokens, tmp_path)
    assert "ids INT64 [N, 16]: tokens, 16 a sample" in text
    assert '# preprocess = "text.toml"' in text
    for name in ("calibration.txt", "text.toml"):
        (tmp_path / name).touch()
    text = text_for(tokens, tmp_path)
    assert 'calibration = "calibration.txt"' in text
    assert '\npreprocess = "text.toml"' in text
    frames = models.model("uint8[N,8,8,3] frames) => (float[N,8,8,3] y", "y = Cast <to = 1> (frames)")
    nhwc = text_for(frames, tmp_path)
    assert "an image, 3 channels, 8 x 8, layout nhwc" in nhwc
    assert "# preprocess" in nhwc  # a comment, because UINT8 frames need no preprocessing


def test_an_int8_input_which_may_cut_imagenets_values_gets_no_guess(tmp_path: Path) -> None:
    """MLPerf Tiny's model of persons takes shares of 255: ImageNet's -2.1 to 2.6 would become 0 and 1."""
    frames = models.model("int8[N,8,8,3] frames) => (float[N,8,8,3] y", "y = Cast <to = 1> (frames)")
    source = load_source(models.write(frames, tmp_path / "net.onnx"))
    text = model_file_text(replace(source, scales={"frames": (1 / 255, 0)}), {}, ["this-machine"])
    assert '\n# preprocess = "preprocess.toml"' in text


def with_rows(rows: int) -> Any:
    """Return a model of images of 32 pixels with an output of seven values for each of `rows`."""
    body = "f = Flatten (image) c = MatMul (f, w) boxes = Reshape (c, s)"
    weights = {"w": models.random(3 * 32 * 32, 7 * rows), "s": np.array([-1, 7, rows])}
    return models.model(f"float[N,3,32,32] image) => (float[N,7,{rows}] boxes", body, weights)


@pytest.mark.parametrize("rows", [16 + 4 + 1, 3 * (16 + 4 + 1)])
def test_a_detector_gets_the_processing_of_a_detector(rows: int, tmp_path: Path) -> None:
    text = text_for(with_rows(rows), tmp_path)
    assert f"boxes FP32 [N, 7, {rows}]: boxes and scores" in text
    values = read_model_file_from(text, tmp_path)
    assert (values["preprocess"], values["postprocess"]) == ("yolo", "yolo")


@pytest.mark.parametrize("rows", [20, 300])
def test_an_output_with_another_number_of_rows_than_yolo_is_not_taken_for_a_detector(rows: int, tmp_path: Path) -> None:
    """A recognizer of captchas answers [N, steps, letters]. Earlier code took it for a detector."""
    text = text_for(with_rows(rows), tmp_path)
    assert "boxes and scores" not in text
    assert "postprocess" not in read_model_file_from(text, tmp_path)


def test_separate_outputs_for_boxes_and_scores_are_not_taken_for_yolo(tmp_path: Path) -> None:
    """MediaPipe's detectors of faces, palms and poses have separate outputs for boxes and scores."""
    proto = with_rows(21)
    proto.graph.node.extend(
        [
            helper.make_node("Slice", ["boxes", "first", "second", "axis"], ["scores"]),
        ]
    )
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.array([number]), name) for name, number in (("first", 0), ("second", 1), ("axis", 1))
    )
    proto.graph.output.append(helper.make_tensor_value_info("scores", 1, ["N", 1, 21]))
    assert "postprocess" not in read_model_file_from(text_for(proto, tmp_path), tmp_path)


def test_a_model_for_segmentation_gets_the_images_of_a_detector_but_no_boxes(tmp_path: Path) -> None:
    source = load_source(models.write(with_rows(21), tmp_path / "net.onnx"))
    boxes, masks = TensorSpec("boxes", "FP32", (-1, 21, 21)), TensorSpec("masks", "FP32", (-1, 16, 32, 32))
    text = model_file_text(replace(source, outputs=(boxes, masks)), {}, ["this-machine"])
    values = read_model_file_from(text, tmp_path)
    assert (values["preprocess"], "postprocess" in values) == ("yolo", False)


def read_model_file_from(text: str, folder: Path) -> dict[str, Any]:
    (folder / "net.toml").write_text(text)
    return read_model_file(folder / "net.toml")


def test_the_name_of_the_model_is_made_from_the_name_of_the_file() -> None:
    assert name_from(Path("My Model_v2.onnx")) == "my-model_v2"


@pytest.mark.parametrize(
    ("file", "name"),
    [("ResNet 50.onnx", "resnet-50"), ("320n.onnx", "model-320n"), ("_a.onnx", "a"), ("模型.onnx", "model")],
)
def test_every_file_name_gives_a_valid_model_name(file: str, name: str) -> None:
    assert name_from(Path(file)) == name


def test_the_options_that_read_the_source_are_written_for_the_build(tmp_path: Path) -> None:
    path = shutil.copy(MODEL, tmp_path)
    source = load_source(Path(path), Conversion(buckets=read_buckets("tokens=8,16", ["ids=1"])))
    given = {"inputs": (), "buckets": "tokens=8,16", "pads": ("ids=1",)}
    values = read_model_file(write_model_file(source, force=False, given=given))
    assert (values["buckets"], values["pads"]) == ("tokens=8,16", ["ids=1"])
    assert "inputs" not in values
    assert "# input   ids INT64 [N, any]: tokens, any number a sample" in (tmp_path / "text.toml").read_text()
