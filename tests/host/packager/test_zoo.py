"""Trained models of other authors keep their accuracy in INT8, measured in the vendors' own engines."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from bench.zoo import data, scores, table
from bench.zoo.__main__ import main
from bench.zoo.runners import RUNS, answers, samples_of
from bench.zoo.vendors import exported
from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion, read_inputs
from edgert_deploy.packager.sources.source_model import load_source
from edgert_deploy.packager.tflite_lowering import lower
from tests.support import models
from tests.support.packs import candidates_of, pack
from tests.support.profiles import profile

Array = NDArray[Any]
FOLDER = Path(__file__).parents[2] / "support" / "models" / "zoo"
MODULES = {"onnxruntime": "onnxruntime", "openvino": "nncf", "tflite": "ai_edge_litert"}
ENGINES = tuple(engine for engine, module in MODULES.items() if importlib.util.find_spec(module))
ANGLE_LINES = 100
TABLES = (table.MODELS, table.RESULTS)


def text_lines(count: int, seed: int) -> Array:
    """Draw lines of text `[N, 3, 48, 192]`, every second one upside down."""
    rng = data.random(seed)
    lines = [data.text_line(text, 48, 192, rng) for text in data.phrases(count, seed)]
    turned = [line.rotate(180) if i % 2 else line for i, line in enumerate(lines)]
    images = np.stack([np.asarray(line, np.float32) for line in turned])
    return np.asarray(images.transpose(0, 3, 1, 2) * 2 / 255 - 1, np.float32)


@dataclass(frozen=True)
class Packed:
    """A bundle's candidates by engine; FP32's answers to the hold-out (`exact`), and each engine's answers."""

    chosen: dict[str, Candidate]
    exact: list[Array]
    answers: dict[str, list[Array]]


def packed(
    name: str, shape: str, calibration: Array, holdout: Array, key: SigningKey, folder: Path, **options: Any
) -> Packed:
    """Build for every engine, unpack the bundle, and run its files in the vendors' engines."""
    source = load_source(FOLDER / name, Conversion(inputs=read_inputs([shape] if shape else [])))
    own = source.inputs[0].name
    request = BuildRequest(
        source,
        CalibrationSet({own: calibration}, None),
        CalibrationSet({own: holdout}, None),
        (replace(profile("box", ENGINES[0], then=ENGINES[1:]), machines=("no-such-machine",)),),  # nothing is timed
        "zoo",
        cache=FileCache(folder / "cache"),
        **options,
    )
    result = pack(request, key, folder / "zoo.edgert")
    samples = samples_of({own: holdout}, {own: holdout.ndim})
    found = {}
    with open_bundle(result.path, None) as bundle:
        bundle.unpack(folder / "out", frozenset(file.path for file in bundle.manifest.files))
        for artifact in bundle.manifest.artifacts:
            found[artifact.engine] = answers(RUNS[artifact.engine](folder / "out" / artifact.entry), samples)
    exact = answers(RUNS["onnxruntime"](FOLDER / name), samples)
    return Packed({one.artifact.engine: one for one in candidates_of(result)}, exact, found)


def test_a_classifier_of_text_keeps_its_labels_in_int8_in_every_engine(signing_key: SigningKey, tmp_path: Path) -> None:
    calibration, holdout = text_lines(16, 1), text_lines(ANGLE_LINES, 2)
    got = packed("ocr-angle.onnx", "x=1,3,48,192", calibration, holdout, signing_key, tmp_path)
    assert set(got.chosen) == set(ENGINES)
    upside_down = np.arange(ANGLE_LINES) % 2
    assert (got.exact[0].argmax(1) == upside_down).mean() > 0.95  # the task is real
    for engine, candidate in got.chosen.items():
        assert candidate.is_int8, engine
        assert not candidate.artifact.is_partly_float, engine
        agreement = scores.labels_agree(got.answers[engine][0], got.exact[0])
        assert agreement >= 0.99 - 1e-9, engine
        assert agreement == pytest.approx(
            candidate.result.accuracy.artifact, abs=1 / ANGLE_LINES
        )  # the gate reported the same


def test_the_chosen_artifact_of_every_engine_keeps_the_notes_of_music(signing_key: SigningKey, tmp_path: Path) -> None:
    calibration, holdout = (data.chords(count, 43844, 22050, seed)[..., None] for count, seed in ((4, 1), (4, 2)))
    options = {"precision": "auto", "recipe": "min-max", "budget": 0}
    got = packed("basic-pitch.onnx", "", calibration, holdout, signing_key, tmp_path, **options)
    assert set(got.chosen) == set(ENGINES)
    for engine in got.chosen:
        assert scores.maps_agree(got.answers[engine][1], got.exact[1]) >= 0.99, engine


def table_row(engine: str, **values: object) -> dict[str, object]:
    """Return a row of model `a` with `values`; all other values are unknown."""
    known = {"model": "a", "kind": "classifier", "engine": engine, "date": "2026-11-22", "host": "a board"}
    keys = ("ours", *(key for columns in TABLES for key in columns.values()))
    return dict.fromkeys(keys) | known | values


def test_the_tables_list_the_rows_that_are_missing_and_the_rows_of_earlier_code() -> None:
    row = table_row("tflite", recipe="min-max", fp32=1.0, ours=0.9917, faster=1.5, smaller=3.21, code="new")
    refused = table_row("openvino", refused="because " * 30, code="old")
    cells = [("a", "tflite"), ("a", "openvino"), ("b", "tflite")]
    text = "\n".join(table.markdown([row, refused], cells, "new"))
    assert "22 November 2026, code `new` on a board;" in text
    assert "Not measured yet: b on TFLite." in text
    assert "Measured with earlier code: a on OpenVINO." in text
    assert "| a | INT8, 1.50x, 0.9917 | refused |  |" in text


def test_the_tables_list_a_model_once_and_the_first_reason_why_int8_was_not_packed() -> None:
    lost = (
        "INT8: texts fell by 0.1250 (1.0000 -> 0.8750 on 120 samples); INT8: texts fell by 0.2 (1 -> 0.8 on 9 samples)"
    )
    packed = table_row("tflite", metric="right label", fp32=1.0, recipe="min-max", ours=0.9917, faster=1.5)
    lossy = table_row("openvino", metric="right label", fp32=1.0, refused=lost)
    slow = table_row("onnxruntime", metric="right label", fp32=1.0, refused="INT8 took 1.2 ms, FP16 took 0.6 ms")
    lines = list(table.markdown([packed, lossy, slow], [], ""))
    assert lines.count("| a | classifier | right label | 1 |") == 1
    assert "| a | TFLite | min-max, 0.9917 |  | 1.5 |  |  |  |" in lines
    assert [line.split(" | ")[-1] for line in lines if line.startswith(("| a | Op", "| a | ON"))] == [
        "scored 0.875 |",
        "slower |",
    ]


@dataclass(frozen=True)
class Exporter:
    """A result of AI Edge Quantizer."""

    content: bytes

    def export_model(self, path: str, overwrite: bool) -> None:
        Path(path).write_bytes(self.content)


def test_a_vendors_artifact_that_stayed_in_float_is_no_int8_result(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    content = lower(models.model("float[1,4] x) => (float[1,4] y", "y = Relu (x)"))
    with pytest.raises(ValueError, match="left the whole model in float"):
        exported(Exporter(content), tmp_path / "m.tflite")


def test_a_list_with_an_unknown_name_is_refused_with_the_known_names(tmp_path: Path) -> None:
    results = ["--results", str(tmp_path / "results.jsonl"), "--only-print"]
    with pytest.raises(SystemExit, match="no model yolo; known: digits, ocr-angle"):
        main(["--models", "digits,yolo", *results])
    with pytest.raises(SystemExit, match="no engine onnx; known: tflite, openvino"):
        main(["--engines", "tflite,onnx", *results])


def test_an_empty_table_says_that_no_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--results", str(tmp_path / "results.jsonl"), "--only-print"])
    assert capsys.readouterr().out.startswith("No row is measured yet")
