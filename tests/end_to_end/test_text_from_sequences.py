"""A model trained with CTC through build, gate and a real daemon: from a sequence or a signal to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.processing.answers.ctc import text_of
from tests.support.examples import built, served
from tests.support.shell import ShellHere

LETTERS = "ab ü"  # the class after them is the blank
STEPS, SIZE = 16, 12
BASIS = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0][: len(LETTERS) + 1].astype(np.float32)


def write_model(path: Path, steps: int | str) -> None:
    """Write a linear layer over each step that finds each class's direction: [N, steps, SIZE] to scores."""
    import onnx

    helper, numpy_helper, kind = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["scores"])],
        "reader",
        [helper.make_tensor_value_info("x", kind, ["N", steps, SIZE])],
        [helper.make_tensor_value_info("scores", kind, ["N", steps, len(BASIS)])],
        [numpy_helper.from_array(np.ascontiguousarray(8 * BASIS.T), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def sequences(random: np.random.Generator, texts: list[str]) -> NDArray[np.float32]:
    """Return sequences for `texts`: each letter takes one or two steps, and a blank follows it."""
    rows = np.full((len(texts), STEPS), len(LETTERS))
    for row, text in zip(rows, texts, strict=True):
        path = [c for letter in text for c in [LETTERS.index(letter)] * int(random.integers(1, 3)) + [len(LETTERS)]]
        row[: len(path)] = path
    return np.asarray(BASIS[rows] + random.normal(0, 0.1, (len(texts), STEPS, SIZE)), np.float32)


def needed(text: str) -> int:
    """Return the maximum number of steps for `text`."""
    return 3 * len(text)


@pytest.mark.parametrize("buckets", [(), ("--buckets", f"steps={STEPS // 2},{STEPS}")], ids=["fixed", "buckets"])
def test_a_sequence_is_answered_as_text(tmp_path: Path, buckets: tuple[str, ...]) -> None:
    random = np.random.default_rng(1)
    texts = ["".join(random.choice(list(LETTERS), int(random.integers(1, 6)))) for _ in range(60)]
    shell = ShellHere(tmp_path)
    write_model(tmp_path / "reader.onnx", "steps" if buckets else STEPS)
    for name, some in (("calibration", texts[:20]), ("holdout", texts[20:])):
        arrays: dict[str, Any] = {"x": sequences(random, some), "transcript": np.array(some)}
        if buckets:
            arrays["lengths"] = np.array([needed(text) for text in some])
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (tmp_path / "labels.txt").write_text("\n".join(LETTERS) + "\n")
    (tmp_path / "post.toml").write_text(f"[ctc]\nblank = {len(LETTERS)}\n")
    build = (
        "reader.onnx", "--calibration", "calibration.npz", "--holdout", "holdout.npz", "--postprocess", "post.toml",
        "--labels", "labels.txt", *buckets,
    )  # fmt: skip
    bundle = built(shell, "reader", ["onnxruntime"], *build)
    row = bundle.targets["onnxruntime"]
    assert (row["metric"], row["fp32"], row["artifact_accuracy"]) == ("1-cer", 1.0, 1.0)
    assert "text by CTC, 5 classes, blank 4" in shell("bundle", "inspect", "reader.edgert").stdout
    with served(bundle, "onnxruntime") as device:
        with device.client() as client:
            answer = client.infer("reader", sequences(random, ["aü b", "", "bb"]), trace=True)
            assert [text_of(text) for text in answer.outputs["scores_text"]] == ["aü b", "", "bb"]
            assert answer.outputs["scores_probability"].tolist() == pytest.approx([1, 0, 1], abs=0.05)
            assert answer.stages.postprocess_us > 0
            if buckets:
                short = client.infer("reader", sequences(random, ["ab"])[:, : needed("ab")])
                assert text_of(short["scores_text"][0]) == "ab"
        np.save(tmp_path / "one.npy", sequences(random, ["ü a"]))
        shown = shell("infer", "reader", "--input", "one.npy", "--socket", str(device.socket))
        assert "scores_text  'ü a'" in shown.stdout


def test_a_signal_is_answered_as_text_and_the_health_check_compares_the_scores(tmp_path: Path) -> None:
    random, shell = np.random.default_rng(2), ShellHere(tmp_path)
    texts = ["".join(random.choice(list(LETTERS), int(random.integers(1, 6)))) for _ in range(60)]
    write_model(tmp_path / "reader.onnx", STEPS)
    for name, some in (("calibration", texts[:20]), ("holdout", texts[20:])):
        np.savez(tmp_path / f"{name}.npz", x=sequences(random, some), transcript=np.array(some))
    (tmp_path / "labels.txt").write_text("\n".join(LETTERS) + "\n")
    (tmp_path / "pre.toml").write_text(f"[series]\nchannels = {SIZE}\nlength = {STEPS}\nstep = {STEPS}\n")
    (tmp_path / "post.toml").write_text(f"[ctc]\nblank = {len(LETTERS)}\n")
    build = (
        "reader.onnx", "--calibration", "calibration.npz", "--holdout", "holdout.npz", "--preprocess", "pre.toml",
        "--postprocess", "post.toml", "--labels", "labels.txt",
    )  # fmt: skip
    bundle = built(shell, "reader", ["onnxruntime"], *build)
    with served(bundle, "onnxruntime") as device, device.client() as client:
        two = sequences(random, ["aü b", "bb"]).reshape(-1, SIZE)
        answer = client.infer("reader", two)
        assert [text_of(text) for text in answer["scores_text"]] == ["aü b", "bb"]
        assert answer["scores"].shape == (2, STEPS, len(BASIS))
