"""The fault engine fails as its artifact says, and is the null engine otherwise."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.engines import EngineOptions, LocalArtifact, Session
from edgert.engines.fault import EXIT_CODE, MAGIC, FaultEngine
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec
from tests.support.devices import WAIT_S_MAX

ITEM = np.ones((1, 4), np.float32)
SPEC = TensorSpec("x", "FP32", (-1, 4))


def load(folder: Path, **program: Any) -> Session:
    path = folder / "model.json"
    path.write_text(json.dumps({"op": "copy", **program}))
    return FaultEngine().load(LocalArtifact("fault", path, (SPEC,), (SPEC,), "0"), EngineOptions())


def magic(fault: str) -> np.ndarray[Any, Any]:
    value = next(value for value, name in MAGIC.items() if name == fault)
    return np.array([[1.0, value, 1.0, 1.0]], np.float32)


def test_without_faults_the_engine_answers_like_the_null_engine(tmp_path: Path) -> None:
    session = load(tmp_path)
    assert session.run([ITEM])[0].tolist() == ITEM.tolist()
    session.close()


def test_the_engine_raises_or_slows_down_or_gives_wrong_answers_on_request(tmp_path: Path) -> None:
    session = load(tmp_path)
    with pytest.raises(EngineFailed):
        session.run([magic("raise")])
    began = time.monotonic()
    session.run([magic("slow")])
    assert time.monotonic() - began >= 0.5
    assert session.run([magic("wrong")])[0][0, 0] == 2.0
    assert session.run([ITEM])[0][0, 0] == 1.0


def test_a_fault_can_begin_after_some_runs_or_with_a_value_or_with_a_file(tmp_path: Path) -> None:
    marker = tmp_path / "on"
    runs = [
        {"fault": "wrong", "after": 2},
        {"fault": "raise", "value": 7.0},
        {"fault": "raise", "while_file": str(marker)},
    ]
    session = load(tmp_path, runs=runs)
    assert [session.run([ITEM])[0][0, 0] for _ in range(3)] == [1.0, 1.0, 2.0]
    with pytest.raises(EngineFailed):
        session.run([ITEM * 7])
    marker.touch()
    with pytest.raises(EngineFailed):
        session.run([ITEM])


def test_a_program_with_unknown_faults_does_not_load(tmp_path: Path) -> None:
    for program in ({"runs": [{"fault": "sing"}]}, {"load": {"fault": "raise"}}, {"runs": [{"fault": "exit", "x": 1}]}):
        with pytest.raises(EngineFailed):
            load(tmp_path, **program)


@pytest.mark.parametrize(("fault", "code"), [("segfault", -11), ("exit", EXIT_CODE)])
@pytest.mark.parametrize("when", ["load", "run"])
def test_a_crash_ends_the_process(tmp_path: Path, fault: str, code: int, when: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_trigger, args=(tmp_path, fault, when))
    process.start()
    process.join(WAIT_S_MAX)
    assert process.exitcode == code


def _trigger(folder: Path, fault: str, when: str) -> None:
    if when == "load":
        load(folder, load={"fault": fault})
    else:
        load(folder).run([magic(fault)])
