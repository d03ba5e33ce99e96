"""Timing here, or on a device behind a real sshd: only a clearly faster candidate replaces a simpler one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import ConfigInvalid, NotBootstrapped
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.packager.builders import BuildSpec, Precision
from edgert_deploy.packager.candidates import measure
from edgert_deploy.packager.candidates.candidate import CandidateBuilder
from edgert_deploy.packager.candidates.evaluation import evaluate_source
from edgert_deploy.packager.candidates.measure import Measurer, Timing, fastest, measurer_on
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from hil.support.sshd import SshDevice
from tests.support import models
from tests.support.profiles import profile


class Named:
    def __init__(self, name: str) -> None:
        self.id = name


def test_a_later_candidate_must_be_clearly_faster_than_a_simpler_one() -> None:
    int8, fp16, fp32 = candidates = [Named("int8"), Named("fp16"), Named("fp32")]

    def chosen(*times: float | None) -> Any:
        timings = {
            c.id: Timing("here", error="none") if t is None else Timing("here", t)
            for c, t in zip(candidates, times, strict=True)
        }
        return fastest(candidates, timings)  # type: ignore[arg-type]  # only the id is looked at

    assert chosen(1.0, 0.96, 0.96) is int8
    assert chosen(1.0, 0.94, 0.91) is fp16  # and FP32 is not 5 % faster than FP16
    assert chosen(1.0, 0.96, 0.90) is fp32
    assert chosen(None, 1.0, 0.97) is fp16
    assert chosen(None, None, None) is int8


@pytest.fixture
def build_request(
    digits_source: SourceModel,
    digits_calibration: CalibrationSet,
    digits_holdout: CalibrationSet,
    monkeypatch: pytest.MonkeyPatch,
) -> BuildRequest:
    monkeypatch.setattr(measure, "SECONDS", 0.2)
    return BuildRequest(
        digits_source, digits_calibration, digits_holdout, (profile("box"),), "digits", precision="auto"
    )


def pack(request: BuildRequest, key: SigningKey, out: Path, lines: list[str]) -> dict[str, Any]:
    result = build_bundle(request, key, out, lines.append, lambda choice: None)
    with open_bundle(result.path, None) as bundle:
        receipt = read_receipt(bundle)
        assert receipt is not None
        assert list(bundle.manifest.targets[0].artifacts) == receipt["targets"][0]["artifacts"]
    return receipt


def test_every_precision_is_timed_and_the_receipt_holds_the_table(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    receipt = pack(replace(build_request, measure=Measurer()), signing_key, tmp_path / "x.edgert", [])
    times = {one["id"]: one for one in receipt["targets"][0]["times"]}
    assert list(times) == ["onnxruntime-fp16", "onnxruntime-fp32", "onnxruntime-int8"]
    assert all(one["where"] == "here" and one["p50_ms"] > 0 and one["runs"] >= 15 for one in times.values())
    assert {one["id"] for one in receipt["candidates"]} == set(times)
    first = receipt["targets"][0]["artifacts"][0]
    # On any machine, no candidate is faster than the chosen one by more than the margin.
    assert min(one["p50_ms"] for one in times.values()) >= 0.94 * times[first]["p50_ms"]


def test_a_profile_of_another_processor_is_not_timed_here(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    other = replace(profile("other"), machines=("no-such-machine",))
    lines: list[str] = []
    receipt = pack(
        replace(build_request, targets=(other,), measure=Measurer()), signing_key, tmp_path / "x.edgert", lines
    )
    assert receipt["targets"][0]["times"] == []
    assert receipt["targets"][0]["artifacts"] == ["onnxruntime-int8"]
    assert any("other is not measured" in line for line in lines)


def test_an_artifact_that_crashes_its_engine_is_not_timed_and_the_others_are_timed(tmp_path: Path) -> None:
    source = load_source(models.write(models.dividing(), tmp_path / "m.onnx"))
    calibration, holdout = (CalibrationSet({"x": models.for_dividing(30, seed)}, None) for seed in (0, 1))
    request = BuildRequest(source, calibration, holdout, (profile("box"),), "m")
    evaluation = evaluate_source(request)
    builder = CandidateBuilder(evaluation, FileCache(tmp_path / "cache"), tmp_path, lambda line: None)
    precisions: tuple[Precision, ...] = ("int8", "fp32")
    candidates = [builder.build(BuildSpec("onnxruntime", precision, profile("box"))) for precision in precisions]
    only = CalibrationSet({"x": models.crashing(np.empty((0, 4), np.float32), in_int8_only=True)}, None)
    lines = list[str]()
    timings = Measurer()(profile("box"), replace(evaluation, golden_set=only), candidates, lines.append)
    assert "was killed by signal 8" in timings["onnxruntime-int8"].error  # SIGFPE
    assert timings["onnxruntime-fp32"].p50_ms > 0
    assert any("each artifact is timed alone" in line for line in lines)


def with_edgertd(sshd: SshDevice) -> None:
    """Make an environment like bootstrap's, with the `edgertd` of this source tree."""
    program = Path(sshd.device().home) / "venv" / "bin" / "edgertd"
    program.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
    program.write_text(f"#!/bin/sh\nPYTHONPATH='{path}' exec '{sys.executable}' -m edgert.cli \"$@\"\n")
    program.chmod(0o755)


def test_a_device_times_the_candidates_and_keeps_no_file_of_them(
    build_request: BuildRequest, signing_key: SigningKey, sshd: SshDevice, tmp_path: Path
) -> None:
    device = replace(sshd.device(), profile="this-machine")
    target: DeviceProfile = replace(load_profile("this-machine"), engines=("onnxruntime", "tensorrt"))
    request = replace(build_request, targets=(target,), precision="int8", measure=measurer_on(device, (target,)))
    with pytest.raises(NotBootstrapped, match="bootstrap"):
        pack(request, signing_key, tmp_path / "x.edgert", [])
    with_edgertd(sshd)
    lines: list[str] = []
    receipt = pack(request, signing_key, tmp_path / "x.edgert", lines)
    times = {one["id"]: one for one in receipt["targets"][0]["times"]}
    assert times["onnxruntime-int8"]["where"] == device.name
    assert times["onnxruntime-int8"]["p50_ms"] > 0
    assert "tensorrt is not installed" in times["tensorrt-int8"]["error"]
    assert "tensorrt-int8fp16" in times
    assert receipt["targets"][0]["artifacts"] == ["onnxruntime-int8", "tensorrt-int8"]
    assert any("sending" in line for line in lines)
    assert not list((Path(device.state) / "incoming").glob("bench-*"))


def test_a_device_of_another_kind_is_refused_before_anything_is_built(sshd: SshDevice) -> None:
    with pytest.raises(ConfigInvalid, match="add --target"):
        measurer_on(replace(sshd.device(), profile="intel-nuc"), (profile("box"),))
