"""`edgertd bench` refuses a folder that is not a work folder, and measures each artifact that loads."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from edgert.checks.bench import EARLY_ROUNDS_MIN, ROUND_S, ROUNDS_MIN, SPEC, bench, read_work
from edgert.errors import ConfigInvalid

RUN_S = 2e-6


def test_a_folder_without_a_valid_specification_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot read"):
        read_work(tmp_path)
    for text in ("[]", "{}", '{"format": 1, "artifacts": []}', "not json"):
        (tmp_path / SPEC).write_text(text)
        with pytest.raises(ConfigInvalid, match="is not valid"):
            read_work(tmp_path)
    spec = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
    outside = {"id": "a", "engine": "null", "path": "../secret", "sha256": ""}
    value = {"format": 1, "inputs": [spec], "outputs": [spec], "samples": [], "artifacts": [outside]}
    (tmp_path / SPEC).write_text(json.dumps(value))
    with pytest.raises(ConfigInvalid, match="outside the folder"):
        read_work(tmp_path)
    value |= {"samples": ["x.npy"], "artifacts": [{**outside, "path": "inside"}]}
    (tmp_path / SPEC).write_text(json.dumps(value))
    for sample in (b"", b"PK\x03\x04", b"\x93NUMPY"):
        (tmp_path / "x.npy").write_bytes(sample)
        with pytest.raises(ConfigInvalid, match="is not valid"):
            read_work(tmp_path)


def test_an_artifact_that_does_not_load_has_an_error_and_the_others_are_timed(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    bad = {"id": "bad", "engine": "onnxruntime", "path": "bad.onnx", "sha256": "0"}
    work = read_work(folder_of_null(tmp_path, bad))
    broken, good = bench(work, 0.0, tmp_path / "cache", lambda line: None).results
    assert broken.error is not None
    assert broken.error.code == "device.engine_failed"
    assert good.times is not None
    assert good.times.p50_ms >= 0
    assert good.threads == 1


def test_each_run_of_a_few_microseconds_is_counted(tmp_path: Path) -> None:
    """Each run costs the same. A sum over all runs after each run would take minutes."""
    ticks = count(0.0, RUN_S)
    work = read_work(folder_of_null(tmp_path))
    (found,) = bench(work, 0.0, tmp_path / "cache", lambda line: None, lambda: next(ticks)).results
    assert found.times is not None
    assert found.times.runs == pytest.approx(ROUNDS_MIN * ROUND_S / RUN_S, rel=0.01)
    assert (found.times.p50_ms, found.times.p99_ms) == (1e3 * RUN_S, 1e3 * RUN_S)


@pytest.mark.parametrize("steady", [True, False])
def test_a_measurement_ends_early_once_its_figure_is_stable(tmp_path: Path, steady: bool) -> None:
    now_s, run_s, early_s = 0.0, 2e-4, 2 * EARLY_ROUNDS_MIN * ROUND_S

    def clock() -> float:
        nonlocal now_s
        slow = not steady and int(now_s / early_s * 4) % 2
        now_s += (1 + slow) * run_s
        return now_s

    spec = json.loads((folder_of_null(tmp_path) / SPEC).read_text())
    (tmp_path / SPEC).write_text(json.dumps({**spec, "error_share_max": 0.005}))
    bench(read_work(tmp_path), 10 * early_s, tmp_path / "cache", lambda line: None, clock)
    assert (now_s < 4 * early_s) == steady
    assert (now_s > 10 * early_s) != steady


def folder_of_null(folder: Path, *before: dict[str, str]) -> Path:
    """Write a work folder with the artifacts `before`, and a model of the null engine after them."""
    spec = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
    (folder / "a.null").write_text(json.dumps({"op": "copy"}))
    np.save(folder / "x.npy", np.zeros((1, 2), np.float32))
    artifacts = [*before, {"id": "good", "engine": "null", "path": "a.null", "sha256": "0"}]
    value = {"format": 1, "inputs": [spec], "outputs": [spec], "samples": ["x.npy"], "artifacts": artifacts}
    (folder / SPEC).write_text(json.dumps(value))
    return folder
