"""Run model files in the vendors' own runtimes, one sample at a time on one thread, without EdgeRT's sessions.

INT8 is exact on every processor, as in EdgeRT (docs/decisions/0033).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.onnxruntime import compute_int8_exactly
from edgert.engines.openvino import exact_int8

Array = NDArray[Any]
Sample = dict[str, Array]
Run = Callable[[Sample], list[Array]]


def samples_of(data: Mapping[str, Array], ranks: Mapping[str, int]) -> list[Sample]:
    """Cut data `[N, ...]` into samples: an input whose own first axis is no batch axis loses N."""
    count = len(next(iter(data.values())))
    return [
        {name: array[i] if array.ndim > ranks[name] else array[i : i + 1] for name, array in data.items()}
        for i in range(count)
    ]


def onnxruntime_run(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    compute_int8_exactly(options)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda sample: [np.asarray(out) for out in session.run(None, {name: sample[name] for name in names})]


def openvino_run(path: Path) -> Run:
    import openvino

    # OpenVINO computes FP32 models in bf16 on processors that have it: a reference must not.
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        **exact_int8(),
    }
    core = openvino.Core()
    model = core.read_model(path)
    names = [one.get_any_name() for one in model.inputs]
    requests: dict[tuple[tuple[int, ...], ...], Any] = {}

    def run(sample: Sample) -> list[Array]:
        # With an open batch, OpenVINO runs other INT8 kernels: of one model they lost 0.1 of IoU.
        shapes = tuple(sample[name].shape for name in names)
        if shapes not in requests:
            fixed = model.clone()
            fixed.reshape(dict(zip(names, shapes, strict=True)))
            requests[shapes] = core.compile_model(fixed, "CPU", config).create_infer_request()
        request = requests[shapes]
        request.infer([sample[name] for name in names])
        return [np.array(request.get_output_tensor(i).data) for i in range(len(model.outputs))]

    return run


def tflite_run(path: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()

    def run(sample: Sample) -> list[Array]:
        by_name = len(sample) == 1 or all(one["name"] in sample for one in inputs)
        for i, one in enumerate(inputs):
            array = sample[one["name"]] if by_name and one["name"] in sample else list(sample.values())[i]
            interpreter.set_tensor(one["index"], array.astype(one["dtype"]))
        interpreter.invoke()
        return [interpreter.get_tensor(one["index"]) for one in outputs]

    return run


RUNS: dict[str, Callable[[Path], Run]] = {
    "onnxruntime": onnxruntime_run,
    "openvino": openvino_run,
    "tflite": tflite_run,
    "tensorrt": onnxruntime_run,  # the Q/DQ graph that a Jetson builds its engine from
}


def answers(run: Run, samples: Sequence[Sample], state: tuple[str, int] | None = None) -> list[Array]:
    """Return each output for all samples, `[N, ...]`.

    `state` names an input, and the number of the output that it takes from the sample before, as in a session.
    """
    rows: list[list[Array]] = []
    for sample in samples:
        if state is not None and rows:
            name, output = state
            sample = {**sample, name: rows[-1][output].reshape(sample[name].shape)}
        rows.append(run(sample))
    return [np.concatenate([np.atleast_1d(row[i]) for row in rows]) for i in range(len(rows[0]))]


def times_ms(runs: Sequence[Run], sample: Sample, seconds: float) -> list[float]:
    """Return the median time of each run, ms, all in turn, so that a busy machine is busy for all."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(sample)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 5:
        for run, own in zip(runs, times, strict=True):
            began = time.perf_counter()
            run(sample)
            own.append((time.perf_counter() - began) * 1e3)
    return [float(np.median(own)) for own in times]
