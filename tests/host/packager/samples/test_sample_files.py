"""Files of samples: names of inputs, labels and forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgert.errors import CalibrationInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.sample_files import check_form, check_size, has_npy, read_label_table, stem

SPEC = TensorSpec("in/put:0", "FP32", (-1, 4))


def test_inputs_have_file_names() -> None:
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


def test_the_form_of_an_array_is_that_of_its_input() -> None:
    check_form("s.npz", SPEC, (12, 4), np.dtype("float32"))
    for shape, dtype in (((12, 5), "float32"), ((12,), "float32"), ((12, 4), "uint8")):
        with pytest.raises(CalibrationInvalid, match="in/put:0"):
            check_form("s.npz", SPEC, shape, np.dtype(dtype))
    with pytest.raises(CalibrationInvalid, match="give fewer samples"):
        check_size(Path("s.npz"), 2**40)
