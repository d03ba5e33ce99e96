"""Files of samples: names of inputs, labels and forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgert.errors import CalibrationInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.sample_files import (
    check_form,
    check_size,
    files_in,
    has_npy,
    read_label_table,
    stem,
)

SPEC = TensorSpec("in/put:0", "FP32", (-1, 4))


def test_the_name_of_an_input_becomes_a_valid_file_name() -> None:
    assert (stem("image"), stem(SPEC.name), stem("a-b.c_1")) == ("image", "in_put_0", "a-b.c_1")


def test_npy_files_are_found_under_an_inputs_own_name(tmp_path: Path) -> None:
    assert not has_npy(tmp_path, [SPEC])
    (tmp_path / "in_put_0").mkdir()
    np.save(tmp_path / "in_put_0" / "a.npy", np.zeros(4, np.float32))
    assert has_npy(tmp_path, [SPEC])


def test_labels_are_names_or_numbers(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("file,label\na.png, dog\n\nb.png,0\n")
    assert read_label_table(table, ["cat", "dog"]) == {"a.png": 1, "b.png": 0}
    table.write_text("a.png,wolf\n")
    with pytest.raises(CalibrationInvalid, match=r"line 1 of .*'wolf' is not one of the 2 labels"):
        read_label_table(table, ["cat", "dog"])


def test_a_table_of_labels_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    for content in (
        "\ufefffile,label\r\na.png,1\r\nday/b.png,0\r\n",
        "\ufeffa.png,1\n./day/b.png,0\n",
        "a.png,1\nday\\b.png,0",
    ):
        table.write_bytes(content.encode())
        assert read_label_table(table, []) == {"a.png": 1, "day/b.png": 0}
    table.write_text("filename,class\na.png,1\n")
    with pytest.raises(
        CalibrationInvalid, match=r"label 'class' is .*not a class number; if line 1 is a heading, write `file,label`"
    ):
        read_label_table(table, [])


def test_a_file_with_two_different_labels_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("a.png,1\nb.png,0\na.png,1\n")
    assert read_label_table(table, []) == {"a.png": 1, "b.png": 0}
    table.write_text("a.png,1\nb.png,0\na.png,0\n")
    with pytest.raises(CalibrationInvalid, match=r"line 3 of .* names a\.png again, with another label: keep one"):
        read_label_table(table, [])


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    for name in ("cat", ".ipynb"):
        (tmp_path / name).mkdir()
    for name in ("a.JPG", "cat/b.png", "labels.csv", "notes.md", "._a.jpg", "cat/.hidden.png", ".ipynb/c.png"):
        (tmp_path / name).touch()
    listed = files_in(tmp_path, (".jpg", ".png"))
    assert [path.relative_to(tmp_path).as_posix() for path in listed] == ["a.JPG", "cat/b.png"]
    (tmp_path / "cat" / "c.webp").touch()
    (tmp_path / "d.BMP").touch()
    with pytest.raises(
        CalibrationInvalid,
        match=r"has 2 files in formats that are not read, such as .*c\.webp: convert them to \.jpg or \.png",
    ):
        files_in(tmp_path, (".jpg", ".png"))


def test_an_array_with_another_form_than_its_input_is_refused() -> None:
    check_form("s.npz", SPEC, (12, 4), np.dtype("float32"))
    for shape, dtype in (((12, 5), "float32"), ((12,), "float32"), ((12, 4), "uint8")):
        with pytest.raises(CalibrationInvalid, match="in/put:0"):
            check_form("s.npz", SPEC, shape, np.dtype(dtype))
    with pytest.raises(CalibrationInvalid, match=r"is float64, .* save the array with \.astype\(numpy\.float32\)"):
        check_form("s.npz", SPEC, (12, 4), np.dtype("float64"))
    image = TensorSpec("x", "FP32", (-1, 3, 8, 6))
    with pytest.raises(
        CalibrationInvalid, match=r"same axes in another order: .*numpy\.transpose\(x, \(0, 3, 1, 2\)\)"
    ):
        check_form("s.npz", image, (12, 8, 6, 3), np.dtype("float32"))
    with pytest.raises(CalibrationInvalid, match=r"takes \[samples, 3, 8, 6\]: prepare the samples"):
        check_form("s.npz", image, (12, 8, 6, 4), np.dtype("float32"))
    cloud = TensorSpec("x", "FP32", (-1, 3))
    with pytest.raises(
        CalibrationInvalid, match=r"axis 0 of the model's input is not the batch, give --input x=1,64,3$"
    ):
        check_form("s.npz", cloud, (12, 64, 3), np.dtype("float32"))
    with pytest.raises(CalibrationInvalid, match=r"takes \[samples, 3\]: prepare the samples"):
        check_form("s.npz", cloud, (12, 1, 3), np.dtype("float32"))
    with pytest.raises(CalibrationInvalid, match="give fewer samples"):
        check_size(Path("s.npz"), 2**40)
