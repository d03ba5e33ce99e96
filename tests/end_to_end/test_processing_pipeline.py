"""From an image to labels or boxes: `edgert build` with image folders, a real daemon, a client that sends files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from edgert.errors import RequestError
from edgert.processing.images.image import ImageReader
from tests.support import models
from tests.support.devices import Device, a_device
from tests.support.models.images import encoded, photo, png_header
from tests.support.shell import Shell, ShellHere

COLOURS = {"blue": 2, "green": 1, "red": 0}  # folders, and their dominant channel
LABELS = ("red", "green", "blue")
SIDE = 320


def tinted(label: str, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    picture = photo(height, width, seed) // 2
    picture[..., COLOURS[label]] += 120
    return picture


def colour_model() -> Any:
    """Return [N, 3, 32, 32] -> the amount of each channel."""
    body = "g = GlobalAveragePool(image) f = Flatten(g) scores = Gemm(f, w)"
    return models.model("float[N,3,32,32] image) => (float[N,3] scores", body, {"w": 4 * np.eye(3, dtype=np.float32)})


def bright_model() -> Any:
    """Return [N, 3, 320, 320] -> [N, 5, 4]: the box around the bright part, four times, in YOLO's form."""
    body = """
        red = Slice (image, zero, one, axis)
        bright = Greater (red, half)
        low_x = Where (bright, xs, large)    high_x = Where (bright, xs, zero_f)
        low_y = Where (bright, ys, large)    high_y = Where (bright, ys, zero_f)
        left = ReduceMin <axes = [2, 3], keepdims = 0> (low_x)
        right_p = ReduceMax <axes = [2, 3], keepdims = 0> (high_x)
        top = ReduceMin <axes = [2, 3], keepdims = 0> (low_y)
        bottom_p = ReduceMax <axes = [2, 3], keepdims = 0> (high_y)
        right = Add (right_p, one_f)         bottom = Add (bottom_p, one_f)
        wide = Sub (right, left)             high = Sub (bottom, top)
        half_w = Mul (wide, half)            half_h = Mul (high, half)
        cx = Add (left, half_w)              cy = Add (top, half_h)
        nothing = Mul (cx, zero_f)           score = Add (nothing, sure)
        row = Concat <axis = 1> (cx, cy, wide, high, score)
        one_box = Unsqueeze (row, last)
        output0 = Concat <axis = 2> (one_box, one_box, one_box, one_box, one_box, one_box)
    """
    grid = np.arange(SIDE, dtype=np.float32)
    weights = {
        "xs": grid.reshape(1, 1, 1, SIDE),
        "ys": grid.reshape(1, 1, SIDE, 1),
        "half": np.array([0.5], np.float32),
        "large": np.array([1000.0], np.float32),
        "zero_f": np.array([0.0], np.float32),
        "one_f": np.array([1.0], np.float32),
        "sure": np.array([0.9], np.float32),
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "axis": np.array([1], np.int64),
        "last": np.array([2], np.int64),
    }
    signature = f"float[N,3,{SIDE},{SIDE}] image) => (float[N,5,6] output0"
    return models.model(signature, body, {name: np.asarray(value) for name, value in weights.items()})


def lamp(height: int, width: int, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Return a dark image with a lit rectangle (left, top, right, bottom)."""
    picture = np.full((height, width, 3), 20, np.uint8)
    left, top, right, bottom = box
    picture[top:bottom, left:right] = 235
    return picture


def build(shell: Shell, key: Path, *words: str) -> dict[str, Any]:
    done = shell("build", *words, "--target", "this-machine", "--precision", "fp32", "--key", str(key), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("images"))
    assert shell("keys", "new", "--dir", "keys").returncode == 0
    for name, numbers in (("calibration", range(4)), ("holdout", range(10, 13))):
        for label in LABELS:
            (shell.folder / name / label).mkdir(parents=True)
            for i in numbers:
                file = encoded(tinted(label, 90 + i, 120, i), "JPEG" if i % 2 else "PNG")
                (shell.folder / name / label / f"{i}.{'jpg' if i % 2 else 'png'}").write_bytes(file)
    (shell.folder / "lamps").mkdir()
    for i in range(10):
        (shell.folder / "lamps" / f"{i}.png").write_bytes(encoded(lamp(90, 120, (10 + i, 10, 60, 50 + i)), "PNG"))
    (shell.folder / "labels.txt").write_text("\n".join(LABELS))
    (shell.folder / "lamp.txt").write_text("lamp")
    models.write(colour_model(), shell.folder / "colour.onnx")
    models.write(bright_model(), shell.folder / "bright.onnx")
    return shell


@pytest.fixture(scope="module")
def device(shell: Shell) -> Iterator[Device]:
    key = shell.folder / "keys/default.key.pem"
    made = build(
        shell, key, "colour.onnx", "--calibration", "calibration", "--holdout", "holdout", "--labels", "labels.txt",
        "--preprocess", "imagenet", "--out", "colour.edgert",
    )  # fmt: skip
    assert made["targets"][0]["metric"] == "top1"  # the names of the folders are the labels
    assert made["targets"][0]["fp32"] == 1.0
    build(
        shell, key, "bright.onnx", "--calibration", "lamps", "--holdout", "lamps", "--labels", "lamp.txt",
        "--preprocess", "yolo", "--postprocess", "yolo", "--allow-overlap", "--out", "bright.edgert",
    )  # fmt: skip
    with a_device(started=False) as device:
        (device.state.keys / "builder.pem").write_bytes((shell.folder / "keys/default.pem").read_bytes())
        device.start()
        for model in ("colour", "bright"):
            device.keep(model, shell.folder / f"{model}.edgert", checked=True)
        yield device


def named(client: Client, answer: dict[str, NDArray[Any]]) -> str:
    return client.labels("colour")[int(answer["scores_classes"][0])]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_image_file_is_answered_with_its_label(client: Client, label: str, form: str, kind: Any) -> None:
    answer = client.infer("colour", kind(encoded(tinted(label, 200, 301), form)))
    assert named(client, answer) == label
    assert answer["scores"].shape == (3,)  # one file, so no batch axis
    assert 0.33 < float(answer["scores_probabilities"][0]) <= 1.0


def test_a_file_and_a_frame_of_one_image_agree_and_a_tensor_of_the_model_is_accepted(client: Client) -> None:
    picture = tinted("green", 200, 300)
    by_file = client.infer("colour", encoded(picture, "PNG"))["scores"]
    by_frame = client.infer("colour", picture)["scores"]
    assert np.allclose(by_file, by_frame, atol=0.02)
    meta = client.metadata("colour")
    assert meta["preprocess"]["input"]["shape"] == [-1, -1, -1, 3]
    assert meta["preprocess"]["files"]["shape"] == [-1, -1]
    tensor = np.zeros((3, 32, 32), np.float32)
    assert client.infer("colour", tensor)["scores"].tolist() == [0.0, 0.0, 0.0]


def test_several_files_are_one_batch(client: Client) -> None:
    files = [encoded(tinted(label, 50 + 40 * i, 77), "JPEG") for i, label in enumerate(LABELS)]
    answer = client.infer("colour", files)
    assert answer["scores_classes"].ravel().tolist() == [0, 1, 2]


def test_stages_are_timed_and_a_cache_hit_decodes_nothing(client: Client) -> None:
    file = encoded(tinted("red", 900, 1200, seed=7))
    first = client.infer("colour", file, trace=True)
    again = client.infer("colour", file, trace=True)
    assert first.stages.preprocess_us > 1000
    assert not first.cache_hit
    assert again.cache_hit
    assert again.stages.preprocess_us == 0
    assert again.stages.cache_us < first.stages.preprocess_us
    assert again.outputs["scores"].tolist() == first.outputs["scores"].tolist()


@pytest.mark.parametrize(
    "bad", [b"", b"no picture", png_header(30_000, 30_000), encoded(photo(99, 99))[:-500]], ids=str
)
def test_an_invalid_file_fails_only_its_own_request(client: Client, bad: bytes) -> None:
    with pytest.raises(RequestError):
        client.infer("colour", bad)
    assert named(client, client.infer("colour", encoded(tinted("blue", 60, 60)))) == "blue"


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (300, 400, (100, 50, 220, 170)),
        (400, 300, (10, 200, 290, 390)),
        (1080, 1920, (600, 300, 1500, 1000)),
        (320, 320, (0, 0, 320, 320)),
        (100, 90, (20, 30, 50, 60)),
    ],
)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "frame"])
def test_boxes_have_the_coordinates_of_the_sent_image(
    client: Client, form: str, height: int, width: int, box: tuple[int, int, int, int]
) -> None:
    picture = lamp(height, width, box)
    answer = client.infer("bright", picture if form == "frame" else encoded(picture, form))
    assert set(answer) == {"detected_boxes", "detected_scores", "detected_classes", "detected_count"}
    assert int(answer["detected_count"]) == 1  # the model gave the same box six times
    assert client.labels("bright")[int(answer["detected_classes"][0])] == "lamp"
    assert answer["detected_scores"][0] == pytest.approx(0.9, abs=1e-6)
    a_pixel = max(1.0, height / SIDE, width / SIDE)  # a pixel of the coarser grid
    assert np.abs(answer["detected_boxes"][0] - box).max() <= a_pixel
    assert (answer["detected_boxes"][1:] == 0).all()
    assert (answer["detected_classes"][1:] == -1).all()


def test_a_client_that_sends_the_models_tensor_also_gets_the_models_outputs(client: Client) -> None:
    tensor = np.zeros((1, 3, SIDE, SIDE), np.float32)
    tensor[0, 0, 10:20, 30:50] = 1.0
    answer = client.infer("bright", tensor)
    assert answer["output0"].shape == (1, 5, 6)
    assert answer["detected_boxes"][0, 0].tolist() == [30, 10, 50, 20]


def test_inspect_shows_the_processing_rules(shell: Shell) -> None:
    said = shell("bundle", "inspect", "bright.edgert").stdout
    assert "JPEG and PNG files" in said
    assert f"letterbox to {SIDE} x {SIDE}, bilinear, pad 114" in said
    assert "boxes and scores in output0: channels_first, cxcywh" in said
    assert "crop to 32 x 32, bilinear, shorter side 37" in shell("bundle", "inspect", "colour.edgert").stdout


def test_calibration_uses_the_values_that_the_device_computes(shell: Shell) -> None:
    from edgert.bundle.rules import Preprocess, Resize
    from edgert_deploy.packager.samples.samples import load_samples
    from edgert_deploy.packager.sources.source_model import load_source

    rule = Preprocess("image", 1.0, layout="nhwc", resize=Resize("stretch", 32, 32), decode=True)
    source = load_source(shell.folder / "colour.onnx")
    samples = load_samples(shell.folder / "holdout", source, rule, LABELS, at_least=3)
    first = sorted((shell.folder / "holdout").glob("*/*"))[0]
    pixels, _ = ImageReader(rule, (32, 32)).decoded(first.read_bytes())
    assert np.array_equal(samples.inputs["image"][0], pixels.transpose(2, 0, 1).astype(np.float32))
    assert samples.labels is not None
    assert samples.labels.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]
