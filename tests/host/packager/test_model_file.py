"""The model file: its keys become options of a build, its paths are relative to its folder, its faults are clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.packager.model_file import KEYS, read_model_file


def written(folder: Path, text: str) -> Path:
    path = folder / "net.toml"
    path.write_text(text)
    return path


def test_paths_and_functions_are_relative_to_the_folder_of_the_file_and_names_stay_unchanged(tmp_path: Path) -> None:
    text = """
        model = "net.onnx"
        calibration = "samples/cal.npz"
        holdout = "own_module:holdout"
        metric = "tools/own_module:score"
        preprocess = "imagenet"
        postprocess = "post.toml"
        labels = "/elsewhere/labels.txt"
        targets = ["intel-nuc"]
        max_drop = 0.5
        allow_overlap = true
    """
    assert read_model_file(written(tmp_path, text)) == {
        "model": str(tmp_path / "net.onnx"),
        "calibration": str(tmp_path / "samples" / "cal.npz"),
        "holdout": str(tmp_path / "own_module:holdout"),
        "metric": str(tmp_path / "tools/own_module:score"),
        "preprocess": "imagenet",
        "postprocess": str(tmp_path / "post.toml"),
        "labels": "/elsewhere/labels.txt",
        "targets": ["intel-nuc"],
        "max_drop": 0.5,
        "allow_overlap": True,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('calibraton = "x"', "unknown key 'calibraton'; did you mean 'calibration'"),
        ("zzz = 1", "unknown key 'zzz'; the keys are allow_overlap, buckets, calibration"),
        ("max-drop = 0.1", "did you mean 'max_drop'"),
        ('max_drop = "a lot"', "max_drop = 'a lot' must be a number"),
        ("max_drop = true", "must be a number"),
        ("release = 1.5", "must be a whole number"),
        ('targets = "intel-nuc"', "must be a list of text"),
        ("labels = 3", "labels = 3 must be text"),
        ('with_reference = "yes"', "must be true or false"),
        ("[preprocess]\nscale = 2", "must be text"),
        ("max_drop = 0.1", "does not name its model"),
        ("max_drop = ", "is not TOML"),
    ],
)
def test_the_error_names_the_file_and_the_key_of_a_fault(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words) as caught:
        read_model_file(written(tmp_path, text))
    assert caught.value.message.startswith(str(tmp_path / "net.toml"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"there is no .*absent\.toml"):
        read_model_file(tmp_path / "absent.toml")
    with pytest.raises(ConfigInvalid, match="the limit is 65536"):
        read_model_file(written(tmp_path, "#" * 70_000))


def test_every_key_is_an_option_of_the_command() -> None:
    from edgert_deploy.cli.build import build

    assert set(KEYS) <= {parameter.name for parameter in build.params}
