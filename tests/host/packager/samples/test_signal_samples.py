"""Folders of WAV and CSV files, and arrays of windows, become calibration and hold-out samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.bundle.signal_rules import Series, Sound
from edgert.errors import CalibrationInvalid
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support.needed import needed

wavfile = needed("scipy.io.wavfile")
SOUND = Sound("x", 8000, 1000, step=500, features="mfcc", n_mfcc=5)
SERIES = Series("x", 2, 16, step=16, features=("statistics",), statistics=("mean", "max"), missing="hold")


def source(*item: int) -> SourceModel:
    return SourceModel(Path("m.onnx"), None, "0" * 64, 1, (TensorSpec("x", "FP32", (-1, *item)),), ())


def load(path: Path, rule: Sound | Series, *item: int) -> CalibrationSet:
    return load_samples(path, source(*item), rule, ("no", "yes"), at_least=1)


def test_wav_files_are_cut_into_windows_as_on_a_device_and_each_window_has_the_class_of_its_file(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    for label, count in (("no", 1000), ("yes", 2100)):
        (tmp_path / label).mkdir()
        wavfile.write(tmp_path / label / "a.wav", 8000, random.integers(-9000, 9000, count).astype(np.int16))
    samples = load(tmp_path, SOUND, 5, 7)
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 1, 1, 1]
    assert samples.recordings is not None
    assert samples.recordings.tolist() == [0, 1, 1, 1]
    assert samples.raw is not None
    assert samples.raw.shape == (4, 1000)
    device = SignalPreprocessor(SOUND, source(5, 7).inputs[0])
    files = [np.fromfile(tmp_path / label / "a.wav", np.uint8)[None] for label in ("no", "yes")]
    np.testing.assert_array_equal(samples.inputs["x"], np.concatenate([device(file)[0] for file in files]))


def test_a_table_holds_the_text_of_each_recording(tmp_path: Path) -> None:
    for name in ("a", "b"):
        wavfile.write(tmp_path / f"{name}.wav", 8000, np.zeros(1000, np.int16))

    def transcripts() -> list[str]:
        samples = load_samples(tmp_path, source(5, 7), SOUND, at_least=1, transcripts=True)
        assert samples.labels is None
        return [] if samples.transcripts is None else samples.transcripts.tolist()

    assert transcripts() == []
    (tmp_path / "labels.csv").write_text('file,label\nb.wav,stop\na.wav,"go, now"\n')
    assert transcripts() == ["go, now", "stop"]
    (tmp_path / "labels.csv").write_text("b.wav,stop\na.wav,go, now\n")
    with pytest.raises(CalibrationInvalid, match=r"line 2 .* has 3 columns.*Put a text with a comma in quotes"):
        transcripts()
    (tmp_path / "labels.csv").write_text("a.wav,go\nb.wav,stop\n")
    wavfile.write(tmp_path / "b.wav", 8000, np.zeros(2000, np.int16))
    with pytest.raises(
        CalibrationInvalid, match=r"b\.wav has several windows, .* has one text for all of them \(1 of 2 files\)"
    ):
        transcripts()


def test_a_table_can_give_labels_to_parts_of_a_recording(tmp_path: Path) -> None:
    for name in ("a", "b"):
        wavfile.write(tmp_path / f"{name}.wav", 8000, np.zeros(4000, np.int16))  # 7 windows, every 62.5 ms, of 125 ms

    def labels(table: str) -> list[int]:
        (tmp_path / "labels.csv").write_text("file,label,begin_s,end_s\n" + table)
        found = load(tmp_path, SOUND, 5, 7).labels
        assert found is not None
        return [int(label) for label in found]

    whole = "a.wav,no\nb.wav,no\n"
    assert labels(whole) == [0] * 14
    # The part begins at 0.1 s and has 125 ms. The window at 62.5 ms shows 87.5 ms of it, the window at 125 ms 100 ms.
    assert labels("a.wav,no,,\nb.wav,no, ,\n") == [0] * 14  # spreadsheets write lines with empty cells
    assert labels(whole + "b.wav,yes,0.1,0.225\n") == [0] * 7 + [0, 1, 1, 0, 0, 0, 0]
    assert labels(whole + "a.wav,yes,0.2,0.22\n") == [0, 0, 1, 1, 0, 0, 0] + [0] * 7
    for wrong, says in [
        ("b.wav,yes,0.3,\n", "line 4 .* 0 <= begin_s < end_s"),
        ("b.wav,yes,0.3,0.2\n", "line 4 .* 0 <= begin_s < end_s"),
        ("b.wav,yes,x,0.2\n", "line 4 .* 0 <= begin_s < end_s"),
        ("b.wav,yes,0.3\n", "has 3 columns; give two: file,label, or four"),
        ("c.wav,yes,0.1,0.2\n", r"a line for c\.wav, which is not a recording"),
    ]:
        with pytest.raises(CalibrationInvalid, match=says):
            labels(whole + wrong)
    with pytest.raises(CalibrationInvalid, match=r"has no line for b\.wav"):
        labels("a.wav,no\nb.wav,yes,0.1,0.2\n")


def test_csv_files_have_a_line_for_each_moment_and_empty_cells_are_missing_values(tmp_path: Path) -> None:
    lines = [f"{i},{'' if i == 3 else 2 * i}" for i in range(33)]
    (tmp_path / "run.csv").write_text("time,speed\n" + "\n".join(lines))
    samples = load(tmp_path, SERIES, 2, 2)
    np.testing.assert_allclose(samples.inputs["x"][:, 0], [[7.5, 15], [23.5, 31]])
    assert samples.inputs["x"][0, 1, 1] == 30
    assert samples.labels is None


def test_arrays_hold_windows_of_the_signal(tmp_path: Path) -> None:
    windows = np.random.default_rng(1).normal(0, 1, (9, 16, 2)).astype(np.float32)
    np.savez(tmp_path / "s.npz", x=windows, labels=np.arange(9) % 2)
    samples = load(tmp_path / "s.npz", SERIES, 2, 2)
    np.testing.assert_allclose(samples.inputs["x"][:, :, 0], windows.mean(axis=1), atol=1e-6)
    assert samples.raw is not None
    np.testing.assert_array_equal(samples.raw, windows)


def test_samples_that_are_not_signals_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationInvalid, match=r"holds neither .npy nor \.wav files"):
        load(tmp_path, SOUND, 5, 7)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(CalibrationInvalid, match=r"a\.wav: this is not a WAV file"):
        load(tmp_path, SOUND, 5, 7)
    (tmp_path / "a.csv").write_text("1,2,3\n4,5,6\n")
    with pytest.raises(CalibrationInvalid, match=r"has 3 columns, and the rule has 2 channels: remove .* the time"):
        load(tmp_path, SERIES, 2, 2)
    (tmp_path / "a.csv").write_text("1,2\n3\n")
    with pytest.raises(CalibrationInvalid, match="not a table of numbers"):
        load(tmp_path, SERIES, 2, 2)
    np.savez(tmp_path / "features.npz", x=np.zeros((9, 2, 2), np.float32))
    with pytest.raises(CalibrationInvalid, match=r"shape \[9, 2, 2\]; the model takes \[samples, 16, 2\]"):
        load(tmp_path / "features.npz", SERIES, 2, 2)
    np.savez(tmp_path / "nan.npz", x=np.full((9, 16, 2), np.nan, np.float32))
    with pytest.raises(CalibrationInvalid, match=r"sample 0 of .*nan\.npz: .*only missing values"):
        load(tmp_path / "nan.npz", SERIES, 2, 2)


def test_a_file_with_values_that_are_not_finite_is_named(tmp_path: Path) -> None:
    good = np.random.default_rng(0).normal(0, 0.1, 2000)
    for name, values in (("a", good), ("b", np.where(np.arange(2000) == 1700, 1e300, good)), ("c", good)):
        wavfile.write(tmp_path / f"{name}.wav", 8000, values)  # the file holds floats of 64 bits
        rows = "".join(f"{value!r},1\n" for value in np.where(np.abs(values) > 1, np.inf, values)[1636:].tolist())
        (tmp_path / f"{name}.csv").write_text(rows)
    with pytest.raises(CalibrationInvalid, match=r"b\.wav: the WAV file has values that are not finite"):
        load(tmp_path, SOUND, 5, 7)
    with pytest.raises(CalibrationInvalid, match=r"b\.csv, window 4: the series has infinite values"):
        load(tmp_path, SERIES, 2, 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Path.mkdir, r"cannot read .*labels\.csv: Is a directory"),
        (
            lambda table: table.symlink_to("moved.csv"),
            r"there is no .*labels\.csv: correct the path, or write a line `file,label`",
        ),
        (os.mkfifo, r"labels\.csv is a named pipe"),
    ],
)
def test_a_table_of_labels_that_is_not_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    wavfile.write(tmp_path / "a.wav", 8000, np.zeros(1000, np.int16))
    make(tmp_path / "labels.csv")
    with pytest.raises(CalibrationInvalid, match=says):
        load(tmp_path, SOUND, 5, 7)
