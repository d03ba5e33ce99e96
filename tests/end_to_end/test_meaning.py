"""Images keep their meaning: in every form of input, each artifact receives the values that it was trained on.

The model takes BGR in NCHW, FP32 around 0; the client sends RGB in NHWC, UINT8. The device converts the image,
or the model does with `--fold-preprocess`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from edgert.errors import RequestError
from tests.support import models
from tests.support.examples import ENGINES, Built, built, served
from tests.support.models.colours import LABELS, MEAN, STD, bgr_model, tinted
from tests.support.models.images import encoded
from tests.support.shell import Shell, ShellHere

RULE = """
input = "image"
scale = 0.00392156862745098
mean = [0.4, 0.45, 0.5]
std = [0.2, 0.25, 0.3]
layout = "nhwc"
colour = "bgr"
frame_colour = "rgb"
decode = true
[resize]
rule = "crop"
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("meaning"))
    for label in LABELS:
        (shell.folder / "photos" / label).mkdir(parents=True)
        for i in range(4):
            (shell.folder / "photos" / label / f"{i}.png").write_bytes(encoded(tinted(label, 40 + i, 60, i), "PNG"))
    (shell.folder / "labels.txt").write_text("\n".join(LABELS))
    (shell.folder / "pre.toml").write_text(RULE)
    models.write(bgr_model(), shell.folder / "colour.onnx")
    return shell


@pytest.fixture(scope="module")
def bundles(shell: Shell) -> dict[bool, Built]:
    """Build a bundle for each engine, and for one engine a bundle with folded-in preprocessing."""
    words = ("--calibration", "photos", "--holdout", "photos", "--allow-overlap", "--labels", "labels.txt")
    rules = ("colour.onnx", *words, "--preprocess", "pre.toml")
    return {
        False: built(shell, "colour", ENGINES, *rules),
        True: built(shell, "colour", ["openvino"], *rules, "--fold-preprocess", out="folded"),
    }


@pytest.fixture(scope="module", params=[*((engine, False) for engine in ENGINES), ("openvino", True)], ids=str)
def answering(request: pytest.FixtureRequest, bundles: dict[bool, Built]) -> Iterator[tuple[bool, Client]]:
    """Run a daemon that serves the INT8 artifact of one engine."""
    engine, fold = request.param
    row = bundles[fold].targets[engine]
    assert (row["precision"], row["fp32"], row["artifact_accuracy"]) == ("int8", 1.0, 1.0)
    with served(bundles[fold], engine) as device, device.client() as client:
        yield fold, client


def amounts(picture: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the answer for an image of the model's size: four times the mean of red, green, blue."""
    return np.asarray(picture.reshape(-1, 3).mean(axis=0) / 255 * 4)


def test_frames_and_files_and_batches_of_images_give_the_right_amounts(answering: tuple[bool, Client]) -> None:
    _, client = answering
    for i, label in enumerate(LABELS):
        exact, other = tinted(label, 24, 32, 7), tinted(label, 200, 301, 8)
        answer = client.infer("colour", exact)  # [24, 32, 3] UINT8 RGB to a model of [3, 24, 32] FP32 BGR
        np.testing.assert_allclose(answer["scores"], amounts(exact), atol=0.06)
        assert answer["scores_classes"].tolist() == [i]
        for form in (other, encoded(other, "JPEG"), encoded(other, "PNG")):
            assert client.infer("colour", form)["scores_classes"].tolist() == [i]
    batch = np.stack([tinted(label, 24, 32) for label in LABELS])
    assert client.infer("colour", batch)["scores_classes"].ravel().tolist() == [0, 1, 2]


def test_the_models_own_tensor_is_used_unchanged_and_other_tensors_are_refused(answering: tuple[bool, Client]) -> None:
    fold, client = answering
    picture = tinted("green", 24, 32)
    normalized = ((picture[..., ::-1] / 255 - MEAN) / STD).astype(np.float32).transpose(2, 0, 1)[None]
    if not fold:
        np.testing.assert_allclose(client.infer("colour", normalized)["scores"][0], amounts(picture), atol=0.06)
    else:
        with pytest.raises(RequestError, match=r"takes UINT8"):
            client.infer("colour", normalized)
    with pytest.raises(RequestError, match=r"'image'.*takes"):
        client.infer("colour", np.ascontiguousarray(normalized.transpose(0, 2, 3, 1)))  # FP32 in NHWC: garbage
