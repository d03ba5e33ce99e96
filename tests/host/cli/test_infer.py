"""`edgert infer` sends a request to a device and leaves no file on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.commands import Edgert, stop


def test_infer_asks_a_device_and_leaves_no_file_on_the_device(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    np.save(tmp_path / "in.npy", np.ones((2, 4), np.float32))
    code, answer = edgert("infer", "echo", "--input", tmp_path / "in.npy", "here")
    assert (code, answer["outputs"]["y"]["values"]) == (0, [[1.0] * 4] * 2)
    words = ("infer", "echo", "--input", tmp_path / "in.npy", "here", "--out", tmp_path / "out.npz")
    code, answer = edgert(*words)
    assert (code, answer["outputs"]["y"]) == (0, {"shape": [2, 4], "dtype": "float32"})
    assert np.load(tmp_path / "out.npz")["y"].shape == (2, 4)
    assert list((tmp_path / "dev" / "incoming").iterdir()) == []
    np.savez(tmp_path / "holdout.npz", x=np.ones((2, 4), np.float32), labels=np.array([0, 1]))
    code, answer = edgert("infer", "echo", "--input", tmp_path / "holdout.npz", "here")
    assert (code, answer["outputs"]["y"]["values"]) == (0, [[1.0] * 4] * 2), "the labels of samples are left out"
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07onnx")
    code, answer = edgert("infer", "echo", "--input", tmp_path / "model.onnx", "here")
    assert code == 4
    assert "pickle" not in answer["error"]["message"]
    assert "numpy.save" in answer["error"]["message"]
    for name, content, text in (
        ("rows.csv", b"1,2\n3,4,5\n", "give one line per moment"),
        ("none.csv", b"", "is empty"),
        ("none.wav", b"", "is empty"),
        ("blank.txt", b"\xef\xbb\xbf \n", "contains no text"),
    ):
        (tmp_path / name).write_bytes(content)
        code, answer = edgert("infer", "echo", "--input", tmp_path / name, "here")
        assert (code, text in answer["error"]["message"]) == (4, True)
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0JFIF")
    code, answer = edgert("infer", "echo", "--input", tmp_path / "photo.jpg", "here")
    assert (code, answer["error"]["code"]) == (8, "request.invalid")
    assert "to send files or text, build the model with --preprocess" in answer["error"]["message"]
    code, answer = edgert("infer", "nobody", "--input", tmp_path / "in.npy", "here")
    assert (code, answer["error"]["code"]) == (8, "request.model_not_found")
    stop(tmp_path / "dev")
    code, answer = edgert("infer", "echo", "--input", tmp_path / "in.npy", "here")
    assert (code, answer["error"]["code"]) == (8, "unavailable.daemon")
    assert answer["error"]["message"].endswith("edgert bootstrap here starts a stopped daemon")
    assert edgert("bootstrap", "here")[0] == 0
    assert edgert("infer", "echo", "--input", tmp_path / "in.npy", "here")[0] == 0


def test_a_text_or_a_file_is_sent_and_both_together_are_refused(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    (tmp_path / "one.txt").write_text("hello\n")
    for words in (("--text", "hello"), ("--input", tmp_path / "one.txt")):
        code, answer = edgert("infer", "echo", *words, "here")
        assert (code, answer["error"]["code"]) == (8, "request.invalid")
        assert answer["error"]["message"].startswith(
            "here: model echo takes no text; it takes x FP32 [-1, 4]: give --input"
        )
        assert list((tmp_path / "dev" / "incoming").iterdir()) == []
        assert edgert("infer", "echo", *words, "--text", "more", "--input", tmp_path / "one.txt")[0] == 2
    assert edgert("infer", "echo", "here")[0] == 2
    assert edgert("infer", "echo", "here", "--text", " ")[0] == 2
