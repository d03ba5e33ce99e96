"""Parallel builds: the artifacts are in the cache afterwards, and no process outlives the build."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import WAIT_S_MAX, wait_until

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.activation_ranges import activations
from edgert_deploy.packager.builders import BuildSpec
from edgert_deploy.packager.candidates.build_processes import BuildProcesses, free_memory_bytes
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.paths import DIGITS
from tests.support.shell import EDGERT, Shell

SPECS = [
    BuildSpec("tflite", "int8", load_profile("raspberry-pi-4")),
    BuildSpec("onnxruntime", "int8", load_profile("this-machine")),
]


def processes(folder: Path, source: Any, calibration: Any) -> BuildProcesses:
    return BuildProcesses(folder, source, calibration, FileCache(folder / "cache"))


def test_two_simultaneous_builds_are_in_the_cache_afterwards(
    digits_source: Any, digits_calibration: Any, tmp_path: Path
) -> None:
    builds, lines = processes(tmp_path, digits_source, digits_calibration), list[str]()
    builds.prebuild(SPECS, lines.append, processes=2)
    for spec in SPECS:
        assert builds.is_cached(spec)
    assert {"raspberry-pi-4: building tflite int8", "this-machine: building onnxruntime int8"} <= set(lines)
    lines.clear()
    builds.prebuild(SPECS, lines.append, processes=2)
    assert lines == []
    (tmp_path / "out").mkdir()
    made = builds.cached(SPECS[1], tmp_path / "out")
    assert made is not None
    assert made.path.parent == tmp_path / "out"


class Ends:
    """A model that ends the process that unpickles it."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number

    def SerializeToString(self, deterministic: bool) -> bytes:
        return b""

    def __reduce__(self) -> Any:
        return os.kill, (0, self.signal_number)


def that_ends(signal_number: int, source: SourceModel) -> SourceModel:
    return replace(source, path=Path("hostile.onnx"), proto=Ends(signal_number))


@pytest.mark.parametrize(
    ("signal_number", "message"),
    [
        (signal.SIGSEGV, "the tflite builder crashed .SIGSEGV. on hostile.onnx after .*remove tflite from"),
        (signal.SIGKILL, "the tflite builder ran out of memory on hostile.onnx .*--jobs 1"),
        (signal.SIGXCPU, "the tflite builder took more than 8 h of processor time"),
    ],
)
def test_a_crash_of_a_build_ends_only_its_child(
    signal_number: int, message: str, digits_source: Any, digits_calibration: Any, tmp_path: Path
) -> None:
    hostile = that_ends(signal_number, digits_source)
    for folder in ("hostile", "sound", "out"):
        (tmp_path / folder).mkdir()
    with pytest.raises(BuildFailed, match=message):
        processes(tmp_path / "hostile", hostile, digits_calibration).build(
            SPECS[0], tmp_path / "out", lambda line: None
        )
    sound = processes(tmp_path / "sound", digits_source, digits_calibration)
    made = sound.build(SPECS[1], tmp_path / "out", lambda line: None)
    assert made.path.parent == tmp_path / "out"


def test_ranges_are_measured_in_a_child_and_a_crash_gives_no_ranges(
    digits_source: Any, digits_calibration: Any, tmp_path: Path
) -> None:
    (tmp_path / "hostile").mkdir()
    hostile = that_ends(signal.SIGSEGV, digits_source)
    assert processes(tmp_path / "hostile", hostile, digits_calibration).activations(lambda line: None) == ()
    for name in ("first", "second"):  # the same child serves both builds, although the first build's folder is gone
        folder = tmp_path / name
        folder.mkdir()
        sound = processes(folder, digits_source, digits_calibration)
        assert sound.activations(lambda line: None) == activations(digits_source, digits_calibration) != ()
        shutil.rmtree(folder)


def test_an_error_of_a_builder_in_a_child_is_raised_in_the_parent(digits_calibration: Any, tmp_path: Path) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Tan(x)"), tmp_path / "m.onnx")
    )
    with pytest.raises(OperatorUnsupported, match="Tan"):
        processes(tmp_path, source, digits_calibration).build(SPECS[0], tmp_path, lambda line: None)


@pytest.mark.usefixtures("hang_ups_end")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_and_no_file_outlives_an_interrupted_build(
    shell: Shell, signal_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.env["TMPDIR"] = str(shell.folder / "tmp")
    (shell.folder / "tmp").mkdir()
    words = ["build", str(DIGITS / "digits.onnx"), "--calibration", str(DIGITS / "calibration.npz"), "--holdout"]
    words += [str(DIGITS / "holdout.npz"), "--jobs", "2", "--no-cache", "--out", "d.edgert"]
    words += ["--target", "intel-nuc", "--target", "jetson-orin-nano", "--target", "raspberry-pi-4"]
    build = subprocess.Popen([*EDGERT, *words], cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True)
    assert build.stderr is not None
    assert any("quantizing" in line for line in build.stderr)  # a child prints it
    wait_until(lambda: _children(build.pid), "children run")
    children = _children(build.pid)
    build.send_signal(signal_number)
    assert build.wait(WAIT_S_MAX) == (-signal_number if signal_number == signal.SIGKILL else 130)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all children ended")
    assert shell.files() == {"tmp"}
    build.stderr.close()
    monkeypatch.setattr("tempfile.tempdir", shell.env["TMPDIR"])
    with work_folder() as folder:  # the next build removes the files of a killed build
        assert list(Path(shell.env["TMPDIR"]).iterdir()) == [folder]


def test_free_memory_is_positive_and_at_most_the_memory_of_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory_bytes() <= total


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # this thread has ended
            children += map(int, task.read_text().split())
    return children
