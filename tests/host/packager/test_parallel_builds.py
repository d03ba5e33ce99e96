"""Artifacts built side by side: they lie in the cache afterwards, and no process outlives the build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.build_cache import BuildCache, cache_key
from edgert_deploy.packager.parallel_builds import Job, build_ahead, free_memory_bytes
from tests.support.brokers import until
from tests.support.paths import DIGITS
from tests.support.shell import MAIN, Shell

JOBS = [
    Job("raspberry-pi-4", "tflite", load_profile("raspberry-pi-4"), "int8"),
    Job("this-machine", "onnxruntime", load_profile("this-machine"), "int8"),
]


def test_two_at_once_are_in_the_cache_afterwards(digits_source: Any, digits_calibration: Any, tmp_path: Path) -> None:
    cache, said = BuildCache(tmp_path / "cache"), list[str]()
    build_ahead(digits_source, digits_calibration, JOBS, cache, said.append, processes=2)
    for job in JOBS:
        assert cache.has(cache_key(job.engine, digits_source, digits_calibration, job.profile, job.precision))
    assert {"raspberry-pi-4: building tflite int8", "this-machine: building onnxruntime int8"} <= set(said)
    said.clear()
    build_ahead(digits_source, digits_calibration, JOBS, cache, said.append, processes=2)
    assert said == []


def test_a_process_that_dies_fails_the_build(
    digits_source: Any, digits_calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Too little memory for anything: the children die of it before they have begun.
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(BuildFailed, match="signal 9"):
        build_ahead(digits_source, digits_calibration, JOBS, BuildCache(tmp_path), lambda line: None, processes=2)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_build(shell: Shell, signal_number: int) -> None:
    words = ["build", str(DIGITS / "digits.onnx"), "--calibration", str(DIGITS / "calibration.npz"), "--holdout"]
    words += [str(DIGITS / "holdout.npz"), "--jobs", "2", "--no-cache", "--out", "d.edgert"]
    words += ["--target", "intel-nuc", "--target", "jetson-orin-nano", "--target", "raspberry-pi-4"]
    build = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True
    )
    assert build.stderr is not None
    assert any("building" in line for line in build.stderr)  # until the first child says so
    children = _children(build.pid)
    assert children
    build.send_signal(signal_number)
    assert build.wait(30) == (130 if signal_number == signal.SIGINT else -signal_number)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all children ended")
    assert shell.files() == set()
    build.stderr.close()


def test_free_memory_is_some_of_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory_bytes() <= total


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
