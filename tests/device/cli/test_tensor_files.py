"""Answers on the terminal and in files: the names of classes, and files that are complete or unchanged."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from edgert.cli.tensor_files import Arrays, as_json, as_text, class_names, write_outputs
from edgert.errors import StorageFailed
from tests.support.devices import nothing_may_be_written

OUTPUTS: Arrays = {"scores": np.array([[0.1, 0.9]], np.float32), "scores_classes": np.array([[1, -1]], np.int64)}


def test_the_answer_contains_the_names_of_classes() -> None:
    names = class_names(OUTPUTS, ["cat", "dog"])
    answer = as_json("pets", OUTPUTS, names)["outputs"]
    assert answer["scores_classes"] == {"shape": [1, 2], "dtype": "int64", "values": [[1, -1]], "labels": [["dog", ""]]}
    assert "labels" not in answer["scores"]
    assert "labels" not in as_json("pets", OUTPUTS, names, values=False)["outputs"]["scores_classes"]
    assert as_text(OUTPUTS, names).endswith("scores_classes  int64 [1, 2]\n[[ 1 -1]]\n[['dog' '']]")


def test_one_class_for_each_window_is_shown_in_one_row() -> None:
    windows = {"scores_classes": np.array([[0], [-1], [1]])}
    assert as_text(windows, class_names(windows, ["cat", "dog"])) == "\n".join(
        ["scores_classes  int64 [3, 1]", "[ 0 -1  1]", "['cat' '' 'dog']"]
    )


def test_outputs_without_matching_labels_have_no_names() -> None:
    assert class_names(OUTPUTS, []) == {}
    assert class_names(OUTPUTS, ["cat"]) == {}
    assert class_names({"y_classes": np.array([0.5])}, ["cat"]) == {}


def test_a_name_cannot_control_the_terminal() -> None:
    assert "\x1b" not in as_text(OUTPUTS, class_names(OUTPUTS, ["\x1b[2J", "\x1b[31m"]))


def test_values_that_json_does_not_have_are_texts_and_arrive_exactly() -> None:
    odd = np.array([[np.nan, np.inf, -np.inf, 0.1]], np.float32)
    text = json.dumps(as_json("m", {"y": odd}, {}), allow_nan=False)
    answer = json.loads(text)["outputs"]["y"]
    assert answer["values"][0][:3] == ["NaN", "Infinity", "-Infinity"]
    assert np.array(answer["values"], answer["dtype"]).tobytes() == odd.tobytes()


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    path.write_bytes(b"earlier")
    path.chmod(0o640)
    with nothing_may_be_written(), pytest.raises(StorageFailed, match="cannot write"):
        write_outputs(path, OUTPUTS)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"earlier", [path])
    write_outputs(path, OUTPUTS)
    assert np.array_equal(np.load(path)["scores"], OUTPUTS["scores"])
    assert path.stat().st_mode & 0o777 == 0o640


def test_outputs_can_be_written_to_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(target)
    writer = threading.Thread(target=write_outputs, args=(pipe, OUTPUTS), daemon=True)
    writer.start()
    received = pipe.read_bytes()
    writer.join()
    write_outputs(link, OUTPUTS)
    for content in (received, target.read_bytes()):
        assert np.array_equal(np.load(io.BytesIO(content))["scores"], OUTPUTS["scores"])
    assert link.is_symlink()
