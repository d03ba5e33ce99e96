"""The fault engine: the null engine that also fails on request, in every way that an engine can fail.

Tests of the daemon use this engine. An operator can use it to see how a device handles a bad engine. Its artifact is
the null engine's JSON with two more optional keys:

    {"op": "copy", "load": {"fault": "segfault", "while_file": "/tmp/broken"},
     "runs": [{"fault": "leak", "mb": 5}, {"fault": "wrong", "after": 100}, {"fault": "exit", "value": 7.0}]}

The fault `load` happens when the artifact is loaded. A fault of `runs` happens at every run after the first `after`
runs, including runs during the load. With `value`, the fault happens only if an element of an input equals the value.
If `while_file` is missing, the fault does not happen. If an input contains a value of MAGIC, the
fault of this value happens.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines import Engine, EngineOptions, LocalArtifact, Session
from edgert.engines.null import NullEngine
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec
from edgert.typed_json import Closed, from_json

# These values are exact in FP32, and no app sends them by accident.
MAGIC = {
    -66601.0: "segfault",
    -66602.0: "exit",
    -66603.0: "hang",
    -66604.0: "raise",
    -66605.0: "leak",
    -66606.0: "slow",
    -66607.0: "wrong",
    -66608.0: "hang-holding-lock",
}
SLOW_S = 0.5
LEAK_MB = 10.0
EXIT_CODE = 70


@dataclass(frozen=True)
class Fault(Closed):
    """A fault and its condition. `mb` is the size of a leak; `s` is the pause of a slow run, in seconds."""

    fault: str
    after: int = 0
    value: float | None = None
    mb: float = LEAK_MB
    s: float = SLOW_S
    while_file: str = ""

    def __post_init__(self) -> None:
        if self.fault not in MAGIC.values():
            raise EngineFailed(f"unknown fault {self.fault!r}; known: {', '.join(MAGIC.values())}")

    def strikes(self, run: int, tensors: Sequence[NDArray[Any]]) -> bool:
        if self.while_file and not Path(self.while_file).exists():
            return False
        if self.value is not None:
            return any(bool((array == self.value).any()) for array in tensors)
        return run > self.after


class FaultEngine(Engine):
    name = "fault"

    def version(self) -> str:
        return "1"

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> FaultSession:
        inner = NullEngine().load(artifact, options)
        try:
            program = json.loads(artifact.path.read_bytes())
            at_load = [from_json(Fault, program["load"])] if "load" in program else []
            runs = [from_json(Fault, entry) for entry in program.get("runs", ())]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise EngineFailed(f"fault engine cannot read {artifact.path.name}: {error}") from error
        session = FaultSession(inner, (*runs, *(Fault(fault, value=value) for value, fault in MAGIC.items())))
        for fault in at_load:
            if fault.strikes(1, ()):
                if fault.fault == "slow":
                    options.progress(f"loading takes {fault.s:g} s")
                session.trigger(fault)
        return session


class FaultSession(Session):
    def __init__(self, inner: Session, faults: tuple[Fault, ...]) -> None:
        self.inputs: tuple[TensorSpec, ...] = inner.inputs
        self.outputs: tuple[TensorSpec, ...] = inner.outputs
        self._inner = inner
        self._faults = faults
        self._runs = 0
        self._leaked: list[NDArray[np.uint8]] = []

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self._runs += 1
        wrong = False
        for fault in self._faults:
            if fault.strikes(self._runs, tensors):
                wrong = wrong or fault.fault == "wrong"
                self.trigger(fault)
        outputs = self._inner.run(tensors)
        return [np.asarray(array + 1, array.dtype) for array in outputs] if wrong else outputs

    def trigger(self, fault: Fault) -> None:
        """Cause `fault` now. Returns if the fault only slows the run, leaks memory or changes the answer."""
        if fault.fault == "segfault":
            ctypes.string_at(0)
        elif fault.fault == "exit":
            os._exit(EXIT_CODE)
        elif fault.fault == "hang":
            while True:
                time.sleep(3600)
        elif fault.fault == "hang-holding-lock":
            ctypes.PyDLL(None).pause()  # PyDLL keeps the GIL, so no thread of this process runs
        elif fault.fault == "raise":
            raise EngineFailed("the fault engine was asked to fail")
        elif fault.fault == "leak":
            self._leaked.append(np.ones(int(fault.mb * 1e6), np.uint8))
        elif fault.fault == "slow":
            time.sleep(fault.s)

    def close(self) -> None:
        self._leaked.clear()
        self._inner.close()
