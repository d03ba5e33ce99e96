"""`preprocess.toml` and `labels.txt`: a file that fits the model is read; another is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess, Resize, Smooth
from edgert.errors import ConfigInvalid
from edgert.processing.images.preprocess import Preprocessor
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.processing import read_classify, read_postprocess, read_preprocess
from edgert_deploy.packager.sources.source_model import SourceModel

INPUTS = (TensorSpec("image", "FP32", (-1, 3, 8, 8)), TensorSpec("mask", "UINT8", (-1, 8)))
OUTPUTS = (TensorSpec("boxes", "FP32", (-1, 4)), TensorSpec("scores", "FP32", (-1, 2)))
SOURCE = SourceModel(Path("m.onnx"), None, "0" * 64, 1, INPUTS, OUTPUTS)


def preprocess(folder: Path, text: str) -> Preprocess:
    (folder / "pre.toml").write_text(text)
    return image_rule(folder / "pre.toml", SOURCE)


def image_rule(path: Path, source: SourceModel) -> Preprocess:
    rule = read_preprocess(path, source)
    assert isinstance(rule, Preprocess)
    return rule


def test_all_keys_are_read_and_all_except_the_input_are_optional(tmp_path: Path) -> None:
    text = 'input = "image"\nscale = 0.5\nmean = [1, 2, 3]\nstd = 2.0\nlayout = "nhwc"\n'
    assert preprocess(tmp_path, text) == Preprocess("image", 0.5, (1.0, 2.0, 3.0), (2.0,), "nhwc")
    assert preprocess(tmp_path, 'input = "image"') == Preprocess("image")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "input is missing; the model's inputs are "),
        ("input = 'other'", "input = 'other' is not an input of the model; the model's inputs are "),
        ('input = "x"', "the model's inputs are image, mask"),
        ('input = "mask"', "is UINT8"),
        ('input = "image"\nsize = 3', "unknown key 'size'"),
        ('input = "image"\nmean = [1, 2]', "give 1, or 3"),
        ('input = "image"\nstd = [1, 0, 1]', "no std may be 0"),
        ('input = "image"\nmean = "none"', r"mean\[0\] is 'none'"),
        ('input = "image"\nmean = []', "mean has 0 numbers; give 1, or 3"),
        ('input = "image"\nscale = nan', "scale is not a finite number"),
        ('input = "image"\nlayout = "chwn"', "known"),
        ('input = "image"\ncolour = "cmyk"', "known: rgb"),
        ('input = "image"\ncolour = "gray"\ndecode = true', "needs 3 channels"),
        ('input = "image"\nframe_colour = "gray"', "cannot convert between gray and colour"),
        ('input = "image"\ndecode = 1', "decode is 1, not of type bool"),
        ('input = "image"\nresize = 5', "resize is 5, not an object"),
        ('input = "image"\n[resize]\nsize = 5', "resize has an unknown key 'size'"),
        ('input = "image"\n[resize]\nrule = "squeeze"', "known: stretch"),
        ('input = "image"\n[resize]\nheight = 9', "gives 9 x 8"),
        ('input = "image"\n[resize]\nheight = 8.0', "height is 8.0, not of type int"),
        ('input = "image"\n[resize]\nrule = "crop"\nshortest_side = 7', "longer side"),
        ('input = "image"\n[resize]\npad_value = 256', "0 to 255"),
        ("input = ", "not TOML"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        preprocess(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "says"),
    [("imagenet", "'image' has 1 channel:"), ("imagnet", "give imagenet or yolo"), ("labels.txt", "or a .toml file")],
)
def test_the_error_about_a_wrong_preprocess_lists_the_valid_values(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("one\n")
    path = tmp_path / name if name == "labels.txt" else Path(name)
    with pytest.raises(ConfigInvalid, match=says):
        read_preprocess(path, source((-1, 1, 8, 8)))


def test_labels_belong_to_the_output_that_they_fit(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\n dog \n\n")
    classify = read_classify(tmp_path / "labels.txt", SOURCE)
    assert (classify.output, classify.labels) == ("scores", ("cat", "dog"))


def test_an_empty_line_between_labels_is_refused(tmp_path: Path) -> None:
    """Without the line, the labels below it would belong to other classes: here, the output would have objectness."""
    (tmp_path / "labels.txt").write_text("cat\n\ndog\nbird\n")
    model = source((-1, 3, 8, 8), ("output", (-1, 8, 100)))
    with pytest.raises(ConfigInvalid, match="line 2 is empty"):
        read_postprocess(Path("yolo"), model, tmp_path / "labels.txt")


def test_labels_fit_the_integers_of_a_quantized_classifier(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    outputs = (TensorSpec("ids", "INT64", (-1, 2)), TensorSpec("scores", "INT8", (-1, 2)))
    assert read_classify(tmp_path / "labels.txt", replace(SOURCE, outputs=outputs)).output == "scores"


@pytest.mark.parametrize("data", [b"", b"a\nb\nc\n", b"\xff\xfe\n"])
def test_labels_that_fit_no_output_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    for path in (tmp_path / "labels.txt", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigInvalid):
            read_classify(path, SOURCE)


def source(image: tuple[int, ...], *outputs: tuple[str, tuple[int, ...]]) -> SourceModel:
    specs = tuple(TensorSpec(name, "FP32", shape) for name, shape in outputs)
    return SourceModel(Path("m.onnx"), None, "0" * 64, 1, (TensorSpec("image", "FP32", image),), specs)


def test_a_rule_for_images_gets_the_models_own_size_and_layout(tmp_path: Path) -> None:
    text = 'input = "image"\ndecode = true\nframe_colour = "bgr"\n[resize]\nrule = "letterbox"\npad_value = 0'
    want = Preprocess("image", frame_colour="bgr", resize=Resize("letterbox", 8, 8, pad_value=0), decode=True)
    assert preprocess(tmp_path, text) == want
    last = source((-1, 48, 64, 3))
    (tmp_path / "pre.toml").write_text('input = "image"\n[resize]\nrule = "stretch"')
    assert read_preprocess(tmp_path / "pre.toml", last) == Preprocess(
        "image", model_layout="nhwc", resize=Resize("stretch", 48, 64)
    )


def test_presets_contain_the_values_of_the_training_code() -> None:
    imagenet = image_rule(Path("imagenet"), source((-1, 3, 224, 224)))
    assert imagenet.resize == Resize("crop", 224, 224, shortest_side=256)
    assert (imagenet.mean, imagenet.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (imagenet.layout, imagenet.model_layout, imagenet.decode) == ("nhwc", "nchw", True)
    yolo = image_rule(Path("yolo"), source((1, 640, 640, 3)))
    assert yolo.resize == Resize("letterbox", 640, 640, pad_value=114)
    assert (yolo.scale, yolo.model_layout) == (1 / 255, "nhwc")


def test_a_preset_makes_the_numbers_of_an_int8_input() -> None:
    """Ultralytics' export to TFLite has a step of 1/255 and a zero point of -128."""
    spec = TensorSpec("image", "INT8", (1, 8, 8, 3))
    quantized = replace(source((1, 8, 8, 3)), inputs=(spec,), scales={"image": (1 / 255, -128)})
    frames = np.arange(256, dtype=np.uint8).repeat(3).reshape(4, 8, 8, 3)
    made, _ = Preprocessor(replace(image_rule(Path("yolo"), quantized), resize=None, decode=False), spec)(frames)
    np.testing.assert_array_equal(made, frames.astype(np.int16) - 128)
    rule = image_rule(Path("imagenet"), replace(quantized, scales={"image": (0.02, 5)}))
    plain = image_rule(Path("imagenet"), source((1, 8, 8, 3)))
    real = (100 / 255 - np.array(plain.mean)) / plain.std
    np.testing.assert_allclose((100 / 255 - np.array(rule.mean)) / rule.std, real / 0.02 + 5)
    with pytest.raises(ConfigInvalid, match="or one in INT8 with a scale; this model has 0"):
        read_preprocess(Path("yolo"), replace(quantized, scales={}))


@pytest.mark.parametrize("image", [(-1, 3, -1, -1), (-1, 10), (-1, 4, 8, 8), (-1, 1, 8, 8)])
def test_a_preset_that_does_not_fit_the_model_is_refused(image: tuple[int, ...]) -> None:
    with pytest.raises(ConfigInvalid):
        read_preprocess(Path("imagenet"), source(image))


@pytest.mark.parametrize(
    ("shape", "labels", "form", "objectness"),
    [
        ((-1, 84, 8400), 80, "channels_first", False),
        ((-1, 84, 8400), 0, "channels_first", False),
        ((-1, 25200, 85), 80, "anchors_first", True),
        ((-1, 25200, 85), 0, "anchors_first", True),
        ((-1, 8400, 84), 80, "anchors_first", False),
        ((-1, 5, 21), 1, "channels_first", False),
        ((-1, 8400, 5), 0, "anchors_first", False),
        ((-1, 85, 8400), 80, "channels_first", True),
    ],
)
def test_the_usual_detectors_are_recognized(
    tmp_path: Path, shape: tuple[int, ...], labels: int, form: str, objectness: bool
) -> None:
    names = tuple(f"thing {i}" for i in range(labels))
    (tmp_path / "labels.txt").write_text("\n".join(names))
    model = source((-1, 3, 640, 640), ("scores", (-1, 10)), ("output0", shape))
    found = read_postprocess(Path("yolo"), model, tmp_path / "labels.txt" if labels else None)
    assert found == Detect("output0", labels=names, form=form, objectness=objectness)


@pytest.mark.parametrize("labels", [0, 1])
@pytest.mark.parametrize(
    "outputs",
    [
        [("output0", (1, 37, 8400)), ("output1", (1, 32, 160, 160))],
        [("output0", (1, 8400, 37)), ("output1", (1, 160, 160, 32))],
    ],
)
def test_factors_of_masks_are_not_taken_for_scores(outputs: Any, labels: int, tmp_path: Path) -> None:
    """Example: a YOLOv8 for segmentation with one class. Earlier code answered 33 classes."""
    (tmp_path / "labels.txt").write_text("\n".join(["piece"] * labels))
    (tmp_path / "post.toml").write_text('[detect]\nboxes = "output0"\nform = "channels_first"')
    model = source((1, 3, 640, 640), *outputs)
    for rule in ("yolo", str(tmp_path / "post.toml")):
        with pytest.raises(ConfigInvalid, match="without masks, key points and angles"):
            read_postprocess(Path(rule), model, tmp_path / "labels.txt" if labels else None)


def test_key_points_after_the_score_of_a_box_get_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("person")
    (tmp_path / "post.toml").write_text('[detect]\nboxes = "output0"')
    for rule in ("yolo", str(tmp_path / "post.toml")):
        with pytest.raises(ConfigInvalid, match="let your app read the outputs"):
            read_postprocess(Path(rule), source((1, 3, 640, 640), ("output0", (1, 56, 8400))), tmp_path / "labels.txt")


def test_boxes_that_the_model_suppresses_itself_get_a_next_step(tmp_path: Path) -> None:
    """Example: YOLO26, whose output has the same form with any number of labels."""
    (tmp_path / "labels.txt").write_text("cat\ndog\nbird")
    with pytest.raises(ConfigInvalid, match=r"If the 6 values are a box after suppression, .*end2end=False"):
        read_postprocess(Path("yolo"), source((1, 3, 640, 640), ("b", (1, 300, 6))), tmp_path / "labels.txt")


def test_a_map_of_few_classes_beside_boxes_holds_no_masks() -> None:
    found = read_postprocess(Path("yolo"), source((1, 3, 8, 8), ("b", (1, 14, 8400)), ("road", (1, 2, 8, 8))), None)
    assert found == Detect("b")


def test_the_rule_for_the_outputs_is_read_from_a_file(tmp_path: Path) -> None:
    model = source((-1, 3, 8, 8), ("boxes", (-1, 100, 4)), ("scores", (-1, 100, 3)), ("classes", (-1, 5)))
    path = tmp_path / "post.toml"
    path.write_text(
        '[detect]\nboxes = "boxes"\nscores = "scores"\nform = "anchors_first"\nbox_format = "yxyx"\n'
        "normalized = true\nscore_threshold = 0.5\ndetections_max = 20\n"
    )
    assert read_postprocess(path, model, None) == Detect(
        "boxes",
        "scores",
        form="anchors_first",
        box_format="yxyx",
        normalized=True,
        score_threshold=0.5,
        detections_max=20,
    )
    path.write_text("[classify]\ntop_k = 3\nsoftmax = false\n")
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne")
    assert read_postprocess(path, model, tmp_path / "labels.txt") == Classify("classes", tuple("abcde"), 3, False)
    path.write_text('[classify]\nthreshold = 0.5\nnone = ["a"]\nsmooth = {rule = "mean", windows = 3}\n')
    assert read_postprocess(path, model, tmp_path / "labels.txt") == Classify(
        "classes", tuple("abcde"), threshold=(0.5,), none=("a",), smooth=Smooth("mean", 3)
    )


def test_the_lines_of_a_ctc_labels_file_are_the_texts_of_classes(tmp_path: Path) -> None:
    model = source((-1, 3, 8, 8), ("steps", (-1, 20, 4)))
    path, labels = tmp_path / "post.toml", tmp_path / "labels.txt"
    path.write_text("[ctc]\nblank = 1\nsoftmax = false\n")
    for text in ("a\n \nb\n", "a\r\n \r\nb"):  # a line of one space is a class
        labels.write_bytes(text.encode())
        assert read_postprocess(path, model, labels) == Ctc("steps", ("a", "", " ", "b"), 1, softmax=False)
    labels.write_text("a\n<blank>\n\u3000\n\n")  # and so is an empty one
    assert read_postprocess(path, model, labels) == Ctc("steps", ("a", "<blank>", "\u3000", ""), 1, softmax=False)
    labels.write_text("a\nb\n")
    with pytest.raises(ConfigInvalid, match="ctc has 2 labels, and output 'steps' has 4 classes"):
        read_postprocess(path, model, labels)
    with pytest.raises(ConfigInvalid, match="needs --labels"):
        read_postprocess(path, model, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "exactly one table"),
        ("[detect]\n[classify]\n", "exactly one table"),
        ("detect = 1", "exactly one table"),
        ("[segment]", "exactly one table"),
        ("[detect]\n", "boxes"),
        ('[detect]\nboxes = "x"', "does not have"),
        ('[detect]\nboxes = "boxes"', "needs at least 5"),
        ('[detect]\nboxes = "boxes"\nlabels = []', "with --labels"),
        ('[detect]\nboxes = "boxes"\nscores = "classes"', "3 axes"),
        ('[detect]\nboxes = "boxes"\nform = "sideways"', "known: channels_first"),
        ('[detect]\nboxes = "boxes"\nscore_threshold = 2', "0 to 1"),
        ('[detect]\nboxes = "boxes"\ndetections_max = 0', "detections_max"),
        ('[detect]\nboxes = "boxes"\ndetections_max = 1.5', "detections_max is 1.5, not of type int"),
        ('[detect]\nboxes = "boxes"\nsigmoid = 1', "sigmoid is 1, not of type bool"),
        ("[classify]", "needs output"),
        ('[classify]\noutput = "x"', "does not have"),
        ('[classify]\noutput = "classes"\ntop_k = 0', "top_k"),
        ('[classify]\noutput = "classes"\ntop_k = "1"', r"table \[classify\]: .*top_k"),
        ('[classify]\noutput = "classes"\nthreshold = [0.5, 0.6]', "2 thresholds"),
        (
            '[classify]\noutput = "classes"\nsmooth = {rule = "mean", windows = 3, decay = 1}',
            "smooth has an unknown key 'decay'",
        ),
        ('[classify]\noutput = "classes"\nsmooth = {windows = 3}', "lacks 'rule'"),
        ('[classify]\noutput = "classes"\nsmooth = 3', "smooth"),
        ("[ctc]", "needs --labels"),
    ],
)
def test_rules_that_fit_no_output_are_refused(tmp_path: Path, text: str, says: str) -> None:
    model = source((-1, 3, 8, 8), ("boxes", (-1, 4, 100)), ("scores", (-1, 3, 100)), ("classes", (-1, 5)))
    (tmp_path / "post.toml").write_text(text)
    with pytest.raises(ConfigInvalid, match=says):
        read_postprocess(tmp_path / "post.toml", model, None)


@pytest.mark.parametrize("text", ['[detect]\nboxes = "boxes"', '[classify]\noutput = "classes"'])
def test_labels_that_differ_in_number_from_the_classes_are_refused(tmp_path: Path, text: str) -> None:
    model = source((-1, 3, 8, 8), ("boxes", (-1, 7, 100)), ("classes", (-1, 5)))
    (tmp_path / "post.toml").write_text(text)
    (tmp_path / "labels.txt").write_text("one\ntwo")
    with pytest.raises(ConfigInvalid, match="2 labels"):
        read_postprocess(tmp_path / "post.toml", model, tmp_path / "labels.txt")
