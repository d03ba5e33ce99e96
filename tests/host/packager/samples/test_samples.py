"""Samples fit the model exactly, or an error says what to change."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.bundle.rules import Preprocess, Resize
from edgert.cli.tensor_files import BUILD_ONLY
from edgert.errors import CalibrationInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import (
    NAMES,
    CalibrationSet,
    constant_inputs,
    inputs_of_other_size,
    inputs_out_of_range,
    load_samples,
)
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support import models
from tests.support.models.images import encoded, photo, png_header

X = TensorSpec("x", "FP32", (-1, 4))
SOURCE = SourceModel(Path("m.onnx"), None, "0" * 64, 1, (X,), (TensorSpec("y", "FP32", (-1, 3)),))
GOOD = models.random(12, 4)
SHAPES: tuple[tuple[int, ...], ...] = ((901, 161), (3, 2048, 2048), (64,))


def test_samples_and_labels_are_read(tmp_path: Path) -> None:
    path = models.write_samples(tmp_path / "s.npz", x=GOOD, labels=np.arange(12, dtype=np.uint8) % 3)
    samples = load_samples(path, SOURCE, at_least=10)
    assert len(samples) == 12
    np.testing.assert_array_equal(samples.inputs["x"], GOOD)
    assert samples.labels is not None
    assert samples.labels.dtype == np.int64


def test_infer_ignores_the_arrays_that_only_a_build_needs() -> None:
    assert set(BUILD_ONLY) == set(NAMES)


def test_samples_with_a_narrower_type_of_the_same_kind_are_read(tmp_path: Path) -> None:
    """A model in FP16 is built in FP32, but its samples may be in FP16."""
    samples = load_samples(models.write_samples(tmp_path / "s.npz", x=GOOD.astype(np.float16)), SOURCE, at_least=10)
    assert samples.inputs["x"].dtype == np.float32
    np.testing.assert_array_equal(samples.inputs["x"], GOOD.astype(np.float16).astype(np.float32))


def test_the_number_of_samples_that_run_at_once_falls_with_the_size_of_the_input() -> None:
    """A spectrogram of 0.6 MB has activations of 100 MB. For a model of 0.7 MB, 32 at once took 3.6 GB."""
    runs = {shape: CalibrationSet({"x": np.zeros((8, *shape), np.float32)}, None).run_max for shape in SHAPES}
    assert runs == {(901, 161): 3, (3, 2048, 2048): 1, (64,): 8192}


def test_labels_are_optional_and_unknown_arrays_are_refused_by_name(tmp_path: Path) -> None:
    samples = load_samples(models.write_samples(tmp_path / "s.npz", x=GOOD), SOURCE, at_least=10)
    assert samples.labels is None
    assert list(samples.inputs) == ["x"]
    with pytest.raises(CalibrationInvalid, match="'label', 'y'"):
        load_samples(models.write_samples(tmp_path / "t.npz", x=GOOD, y=GOOD, label=GOOD), SOURCE, at_least=10)


def with_nan() -> Any:
    array = GOOD.copy()
    array[5, 1] = np.nan
    return array


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"image": GOOD}, r"no array 'x'.*found: 'image'"),
        ({"x": (GOOD * 255).astype(np.uint8)}, "is uint8, but the model takes float32"),
        ({"x": GOOD.astype(np.float64)}, "float64"),
        ({"x": GOOD[:, :3]}, r"has shape \[12, 3\]; the model takes \[samples, 4\]"),
        ({"x": GOOD[0]}, "has shape"),
        ({"x": np.float32(1)}, "has shape"),
        ({"x": GOOD[:5]}, "5 samples; at least 10"),
        ({"x": GOOD[:0]}, "0 samples"),
        ({"x": with_nan()}, r"'x' .* NaN or infinity in sample 5 \(1 of 12 samples\)"),
        ({"x": np.where(GOOD > 9, GOOD, np.inf).astype(np.float32)}, "NaN or infinity"),
        ({"x": GOOD, "labels": np.arange(11)}, r"one integer per sample: \[12\]"),
        ({"x": GOOD, "labels": np.ones(12)}, "float64"),
        ({"x": GOOD, "labels": np.arange(12) - 1}, "includes -1, which is not a class: give"),
        ({"x": GOOD, "labels": np.full(12, 2**64 - 1, np.uint64)}, "includes 18446744073709551615"),
    ],
)
def test_samples_that_do_not_fit_are_refused(arrays: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationInvalid, match=says):
        load_samples(models.write_samples(tmp_path / "s.npz", **arrays), SOURCE, at_least=10)


def test_inputs_with_differing_counts_are_refused(tmp_path: Path) -> None:
    source = SourceModel(Path("m"), None, "", 1, (X, TensorSpec("z", "FP32", (-1, 4))), SOURCE.outputs)
    with pytest.raises(CalibrationInvalid, match="different numbers of samples"):
        load_samples(models.write_samples(tmp_path / "s.npz", x=GOOD, z=GOOD[:11]), source, at_least=10)


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('pickle was run')",)


def test_pickled_objects_are_never_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.array([Bomb()], dtype=object))
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Bomb()))
    for name in ("s.npz", "p.npz"):
        with pytest.raises(CalibrationInvalid, match=r"no \.npz"):
            load_samples(tmp_path / name, SOURCE, at_least=1)


def test_a_missing_file_is_refused_and_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npz").touch()
    for name in ("text.npz", "text.npy", "empty.npz", "missing.npz", "missing.npy"):
        with pytest.raises(CalibrationInvalid) as raised:
            load_samples(tmp_path / name, SOURCE, at_least=1)
        assert "pickle" not in raised.value.message
        assert "write it with numpy.save" in raised.value.message
    (tmp_path / "text.csv").write_text("label,x0\n1,0.5\n")
    with pytest.raises(CalibrationInvalid, match=r"is a table, but samples must be arrays: write it with numpy\.save"):
        load_samples(tmp_path / "text.csv", SOURCE, at_least=1)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CalibrationInvalid, match="is a named pipe or a device"):
        load_samples(tmp_path / "pipe.npz", SOURCE, at_least=1)


def test_an_array_of_another_form_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A header may state any size. Here it states 4 TB, and the file has 128 bytes."""
    header = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }"
    bomb = b"\x93NUMPY\x02\x00" + (2**28).to_bytes(4, "little") + bytes(2**28)  # a header that unpacks to 256 MB
    for content, says in ((header.ljust(127) + b"\n", "should have 17592186044416 bytes"), (bomb, r"format \(2, 0\)")):
        with zipfile.ZipFile(tmp_path / "s.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(CalibrationInvalid, match=says):
            load_samples(tmp_path / "s.npz", SOURCE, at_least=1)


def test_a_single_npy_file_gives_the_samples_of_a_model_with_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "calibration.npy", GOOD)
    samples = load_samples(tmp_path / "calibration.npy", SOURCE, at_least=10)
    np.testing.assert_array_equal(samples.inputs["x"], GOOD)
    two = SourceModel(Path("m"), None, "", 1, (X, TensorSpec("z/0", "FP32", (-1, 4))), SOURCE.outputs)
    with pytest.raises(CalibrationInvalid, match=r"2 inputs: 'x', 'z/0'. Give an \.npz .* x\.npy, z_0\.npy"):
        load_samples(tmp_path / "calibration.npy", two, at_least=10)


@pytest.mark.parametrize("name", ["s.npz", "s.npy", "d/x.npy", "d/000.npy", "d/cat/a.jpg", "d/labels.csv"])
def test_the_error_names_a_git_lfs_pointer_in_place_of_samples(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".csv"):
        (path.parent / "a.png").touch()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    image = SourceModel(Path("m"), None, "", 1, (TensorSpec("x", "FP32", (-1, 3, 8, 8)),), SOURCE.outputs)
    rule = Preprocess("x", decode=True, layout="nchw", resize=Resize("stretch", 8, 8))
    with pytest.raises(CalibrationInvalid, match=f"{path} is a Git LFS pointer.*git lfs pull"):
        load_samples(tmp_path / "d" if name.startswith("d/") else path, image, rule, at_least=1)


def test_inputs_that_are_the_same_in_all_samples_are_found() -> None:
    same, ids = np.ones((12, 4), np.float32), np.ones((12, 1), np.int64)
    for inputs, found in (
        ({"x": GOOD, "rate": ids}, []),  # a setting
        ({"x": same, "rate": ids}, ["x", "rate"]),
        ({"x": GOOD, "state": same, "rate": ids}, ["state"]),
        ({"ids": ids}, ["ids"]),
        ({"x": GOOD[:1]}, []),
    ):
        assert constant_inputs(CalibrationSet(inputs, None)) == found  # type: ignore[arg-type]


def test_stacked_npy_files_are_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GOOD)
    np.save(tmp_path / "labels.npy", np.arange(12) % 3)
    samples = load_samples(tmp_path, SOURCE, at_least=10)
    np.testing.assert_array_equal(samples.inputs["x"], GOOD)
    assert samples.labels is not None
    np.save(tmp_path / "x.npy", GOOD.astype(np.float64))
    with pytest.raises(CalibrationInvalid, match="float64"):
        load_samples(tmp_path, SOURCE, at_least=10)
    np.save(tmp_path / "x.npy", GOOD)
    (tmp_path / "labels.npy").unlink()
    os.mkfifo(tmp_path / "labels.npy")
    with pytest.raises(CalibrationInvalid, match=r"labels\.npy is a named pipe"):
        load_samples(tmp_path, SOURCE, at_least=10)


def test_npy_files_with_one_sample_each_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for i, row in enumerate(GOOD):
        np.save(tmp_path / f"{i:03}.npy", row if i % 2 else row[None])
    np.save(tmp_path / "labels.npy", np.arange(12))
    samples = load_samples(tmp_path, SOURCE, at_least=10)
    np.testing.assert_array_equal(samples.inputs["x"], GOOD)
    two = SourceModel(Path("m"), None, "", 1, (X, TensorSpec("z/0", "INT64", (-1, 2))), SOURCE.outputs)
    with pytest.raises(CalibrationInvalid, match=r"x\.npy, z_0\.npy"):
        load_samples(tmp_path, two, at_least=10)
    for name in ("x", "z_0"):
        (tmp_path / "two" / name).mkdir(parents=True)
        for i in range(12):
            np.save(tmp_path / "two" / name / f"{i:03}.npy", GOOD[i] if name == "x" else np.full(2, i))
    samples = load_samples(tmp_path / "two", two, at_least=10)
    assert samples.inputs["z/0"][:, 0].tolist() == list(range(12))
    (tmp_path / "two" / "x" / "000.npy").rename(tmp_path / "two" / "x" / "late.npy")
    with pytest.raises(CalibrationInvalid, match="have different files"):
        load_samples(tmp_path / "two", two, at_least=10)


def test_npy_files_that_contain_objects_or_are_cut_short_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(CalibrationInvalid, match=r"no \.npy"):
        load_samples(tmp_path, SOURCE, at_least=1)
    np.save(tmp_path / "x.npy", GOOD)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    with pytest.raises(CalibrationInvalid, match=r"no \.npy"):
        load_samples(tmp_path, SOURCE, at_least=1)


def test_images_are_labelled_by_a_table(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    rule = Preprocess("x", layout="nhwc", resize=Resize("stretch", 8, 8), decode=True)
    source = SourceModel(Path("m"), None, "", 1, (TensorSpec("x", "FP32", (-1, 3, 8, 8)),), SOURCE.outputs)
    (tmp_path / "day").mkdir()
    for i, name in enumerate(("a.png", "b.png", "day/c.jpg")):
        (tmp_path / name).write_bytes(encoded(photo(9, 9, i), "JPEG" if name.endswith("jpg") else "PNG"))

    def labels(table: str) -> Any:
        (tmp_path / "labels.csv").write_text(table)
        found = load_samples(tmp_path, source, rule, ("cat", "dog"), at_least=3).labels
        assert found is not None
        return found.tolist()

    assert labels("file,label\na.png,dog\n\nb.png, cat\nday/c.jpg,1\n") == [1, 0, 1]
    assert labels("file_name,label\na.png,dog\nb.png,cat\nday/c.jpg,1\n") == [1, 0, 1], "as Hugging Face writes it"
    (tmp_path / "bomb.png").write_bytes(png_header(30_000, 30_000))
    with pytest.raises(CalibrationInvalid, match=r"bomb\.png: the image has"):
        labels("a.png,1\nb.png,0\nbomb.png,0\nday/c.jpg,1\n")
    (tmp_path / "bomb.png").unlink()
    for table, says in [
        ("a.png,dog\n", r"no line for b\.png \(2 of 3"),
        ("a.png,dog,cat\n", "line 1 of .* has 3 columns"),
        ("a.png,horse\n", "label 'horse' is not one of the 2 labels"),
        ("\0,\0\n", "labels"),
    ]:
        with pytest.raises(CalibrationInvalid, match=says):
            labels(table)


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
def test_a_table_of_labels_with_another_name_is_refused(tmp_path: Path, table: str) -> None:
    pytest.importorskip("PIL")
    rule = Preprocess("x", layout="nhwc", resize=Resize("stretch", 8, 8), decode=True)
    source = SourceModel(Path("m"), None, "", 1, (TensorSpec("x", "FP32", (-1, 3, 8, 8)),), SOURCE.outputs)
    (tmp_path / "a.png").write_bytes(encoded(photo(9, 9, 1), "PNG"))
    (tmp_path / table).write_text("file_name,label\na.png,0\n")
    with pytest.raises(CalibrationInvalid, match=rf"EdgeRT does not read .*{table}, .* write .*labels\.csv"):
        load_samples(tmp_path, source, rule, at_least=1)
    (tmp_path / table).rename(tmp_path / "labels.csv")
    found = load_samples(tmp_path, source, rule, at_least=1).labels
    assert found is not None
    assert found.tolist() == [0]


def test_a_file_that_is_cut_or_damaged_anywhere_is_refused_or_gives_whole_samples(tmp_path: Path) -> None:
    whole = models.write_samples(tmp_path / "s.npz", x=GOOD).read_bytes()
    path = tmp_path / "cut.npz"
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at])
        with pytest.raises(CalibrationInvalid):
            load_samples(path, SOURCE, at_least=10)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            samples = load_samples(path, SOURCE, at_least=10)
        except CalibrationInvalid:
            continue
        # zip does not check some bytes, such as time stamps. The data must still be the written data.
        np.testing.assert_array_equal(samples.inputs["x"], GOOD)


def test_an_archive_that_unpacks_beyond_the_limit_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.write_samples(tmp_path / "s.npz", x=np.zeros((1000, 4), np.float32))
    monkeypatch.setattr("edgert_deploy.packager.samples.sample_files.SAMPLES_BYTES_MAX", 10_000)
    with pytest.raises(CalibrationInvalid, match="unpacks to"):
        load_samples(path, SOURCE, at_least=10)


def test_an_archive_may_hold_texts_and_numbers_of_recordings(tmp_path: Path) -> None:
    texts, numbers = np.array([f"text {i}" for i in range(len(GOOD))]), np.arange(len(GOOD)) // 4
    samples = load_samples(
        models.write_samples(tmp_path / "s.npz", x=GOOD, transcript=texts, recording=numbers), SOURCE, at_least=10
    )
    assert samples.transcripts is not None
    assert samples.recordings is not None
    assert (samples.transcripts.tolist(), samples.recordings.tolist()) == (texts.tolist(), numbers.tolist())
    for more, says in (
        ({"transcript": numbers}, "one text per sample"),
        ({"recording": texts}, "number of each window"),
    ):
        with pytest.raises(CalibrationInvalid, match=says):
            load_samples(models.write_samples(tmp_path / "t.npz", x=GOOD, **more), SOURCE, at_least=10)


def test_samples_may_hold_an_input_that_the_model_does_not_read(tmp_path: Path) -> None:
    path = models.write_samples(tmp_path / "s.npz", x=GOOD, types=GOOD)
    with pytest.raises(CalibrationInvalid, match="not inputs of the model: 'types'"):
        load_samples(path, SOURCE, at_least=10)
    assert list(load_samples(path, replace(SOURCE, unread=("types",)), at_least=10).inputs) == ["x"]


def test_sets_of_samples_with_values_of_different_magnitude_are_reported() -> None:
    values, number = GOOD / np.abs(GOOD).max(), np.arange(len(GOOD))
    for factor, found in ((1.0, []), (5.0, []), (255.0, ["x"]), (1 / 255, ["x"]), (0.0, [])):
        sets = [
            CalibrationSet({"x": values * np.float32(f), "n": number * n}, None) for f, n in ((1.0, 1), (factor, 99))
        ]
        assert inputs_of_other_size(*sets) == found


@pytest.mark.parametrize(
    ("low", "high", "found"), [(0.0, 1.0, []), (-1.1, 5.1, []), (0.0, 6.9, ["x"]), (-2.0, 1.0, ["x"])]
)
def test_a_holdout_beyond_the_calibrations_range_is_reported(low: float, high: float, found: list[str]) -> None:
    """INT8 clips values outside the calibration's range."""
    calibration, holdout = (
        CalibrationSet({"x": np.linspace(*ends, 48, dtype=np.float32).reshape(12, 4), "n": np.arange(12) * n}, None)
        for ends, n in (((-1.0, 5.0), 1), ((low, high), 9))
    )
    assert inputs_out_of_range(calibration, holdout) == found
