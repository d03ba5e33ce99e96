"""The source probe: an untrusted ONNX model, checked and run once in a process of its own.

ONNX's checker and ONNX Runtime are native code. A file made to crash them must not take the command
along, so the parent sends the model's bytes to a child, and takes back JSON, or the fact of its death.
The child runs the model on zeros, with one sample and, where the batch is open, with two.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from edgert.engines.onnxruntime import sdk
from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec

PROBE_TIMEOUT_S = 300
CHILD = "from edgert_deploy import source_probe; source_probe.child()"
RUN_BYTES_MAX = 2**33  # the inputs of the largest batch
# What the checker objects to and ONNX Runtime may know better: newer operators, outputs of unstated shape.
_LEFT_TO_THE_RUNTIME = ("No Op registered", "opset", "Field 'shape' of 'type' is required")


@dataclass(frozen=True)
class Probed:
    """NumPy dtype name and shapes (for one sample, then for two) of each output by name."""

    datatypes: dict[str, str]
    shapes: dict[str, tuple[tuple[int, ...], ...]]


def probe(model: bytes, inputs: tuple[TensorSpec, ...]) -> Probed:
    """Check and run `model` in a child process. Raises SourceInvalid with what the tools say of it."""
    specs = json.dumps([spec.as_json() for spec in inputs]).encode()
    # Isolated (-I), so that neither the working folder nor the environment chooses what the child imports.
    program = f"import sys; sys.path[:] = {sys.path!r}; {CHILD}"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            input=len(specs).to_bytes(8, "big") + specs + model,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceInvalid(
            f"the model's first run took more than {PROBE_TIMEOUT_S} s; it is too slow to be packed"
        ) from error
    if done.returncode < 0:
        raise SourceInvalid(
            f"the model crashes onnxruntime (signal {-done.returncode}); the file is damaged: export it again"
        )
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise SourceInvalid(f"the model could not be checked: {last[0][:300]}") from error
    if "error" in answer:
        raise SourceInvalid(str(answer["error"]))
    return Probed(answer["datatypes"], {n: tuple(tuple(s) for s in v) for n, v in answer["shapes"].items()})


def child() -> None:
    """What the child process runs: model on stdin, one line of JSON on the stdout it was started with."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the libraries print goes to stderr
    length = int.from_bytes(sys.stdin.buffer.read(8), "big")
    specs = tuple(TensorSpec.from_json(value) for value in json.loads(sys.stdin.buffer.read(length)))
    try:
        answer = _examine(sys.stdin.buffer.read(), specs)
    except SourceInvalid as error:
        answer = {"error": error.message}
    with os.fdopen(answers, "w") as out:
        json.dump(answer, out)


def _examine(model: bytes, inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    session = _load(model)
    counts = (1, 2) if inputs[0].shape[0] == -1 else (1,)
    runs = [_run(session, inputs, count) for count in counts]
    names = [output.name for output in session.get_outputs()]
    return {
        "datatypes": {name: _datatype(value) for name, value in zip(names, runs[0], strict=True)},
        "shapes": {name: [getattr(run[i], "shape", ()) for run in runs] for i, name in enumerate(names)},
    }


def _load(model: bytes) -> Any:
    import onnx

    onnxruntime = sdk()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        # Reports cycles, duplicate names and shapes that contradict each other more clearly than the runtime.
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker raises classes of three modules
        if not any(words in str(error) for words in _LEFT_TO_THE_RUNTIME):
            raise SourceInvalid(f"the model is not valid ONNX: {_first_line(error)}; export it again") from error
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's exceptions share no base class
        raise SourceInvalid(
            f"onnxruntime {onnxruntime.__version__} does not take the model: {_first_line(error)}; "
            "export it with standard operators, opset 13 to 21"
        ) from error


def _run(session: Any, inputs: tuple[TensorSpec, ...], count: int) -> list[Any]:
    import numpy as np

    feed = {}
    for spec in inputs:
        shape = [count if n == -1 else n for n in spec.shape]
        if int(np.prod(shape, dtype=object)) * spec.dtype.itemsize > RUN_BYTES_MAX:
            raise SourceInvalid(f"input {spec.name!r} of shape {shape} is larger than {RUN_BYTES_MAX} bytes")
        feed[spec.name] = np.zeros(shape, spec.dtype)
    try:
        outputs: list[Any] = session.run(None, feed)
    except Exception as error:  # as above
        advice = (
            "export it so that no layer fixes the batch, or with batch fixed to 1" if count > 1 else "export it again"
        )
        raise SourceInvalid(f"the model does not run on a batch of {count}: {_first_line(error)}; {advice}") from error
    return outputs


def _datatype(value: Any) -> str:
    return str(value.dtype.name) if hasattr(value, "dtype") else type(value).__name__


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0]) if lines else type(error).__name__
    # ONNX Runtime puts the place in its own source in front: "/onnxruntime_src/...:46 void f(int) What was wrong".
    return re.sub(r"^/onnxruntime_src\S+ .*\) (?=[A-Z])", "", text)[:400]
