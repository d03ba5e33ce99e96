"""A recurrent model that detects bursts in noise, and recordings with bursts of 1 kHz.

A GRU with random weights is the memory. Ridge regression on its states learns whether a burst lasted within the last
chunks.
"""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.state import State

CHUNK, LEAD, UNITS, RATE_HZ = 16, 4, 24, 1000
REMEMBERED = 4  # chunks after a burst in which the right answer is still yes
STATE = (State("state", "stateN"),)
RULES = f"""
state_id = "bursts-1"

[sound]
rate_hz = {RATE_HZ}
length = {CHUNK + LEAD}
step = {CHUNK}
lead = {LEAD}
features = "samples"

[[state]]
input = "state"
output = "stateN"
"""

Floats = NDArray[np.float32]


def recording(seed: int, chunks: int = 60) -> tuple[Floats, NDArray[np.int64]]:
    """Return a signal, and for each chunk whether a burst lasts or has lasted REMEMBERED chunks before."""
    random = np.random.default_rng(seed)
    signal = random.normal(0, 0.05, chunks * CHUNK)
    burst = np.zeros(chunks, bool)
    for begin in random.integers(0, chunks, chunks // 12):
        burst[begin : begin + 3] = True
    times = np.arange(len(signal))
    signal += np.repeat(burst, CHUNK) * 0.7 * np.sin(times * random.uniform(0.8, 1.2))
    lasting = [burst[max(0, i - REMEMBERED) : i + 1].any() for i in range(chunks)]
    integers = np.round(signal * 32767).clip(-32768, 32767)
    return (integers / 32768).astype(np.float32), np.array(lasting, np.int64)


def frames(signal: Floats) -> Floats:
    """Return the model's input: each chunk with the samples before it. Zeros precede the first chunk."""
    led = np.concatenate((np.zeros(LEAD, np.float32), signal))
    return np.stack([led[i : i + CHUNK + LEAD] for i in range(0, len(signal), CHUNK)])


def write_model(path: Path) -> Path:
    """Write the trained model: `x` [N, 20] and `state` [1, N, 24] to `scores` [N, 2] and `stateN`."""
    from onnx import TensorProto, helper, numpy_helper, save

    random = np.random.default_rng(7)
    weights = {
        "w": random.normal(0, 0.9, (1, 3 * UNITS, 1)),
        "r": random.normal(0, 0.35, (1, 3 * UNITS, UNITS)),
        "b": np.concatenate((np.full((1, UNITS), 0.6), random.normal(0, 0.3, (1, 5 * UNITS))), axis=1),
        "two": np.full((1,), 2.0),
        "out_w": np.zeros((UNITS, 2)),
        "out_b": np.zeros(2),
    }
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["loudness"], axes=[1], keepdims=1),
        helper.make_node("Sqrt", ["loudness"], ["level"]),
        helper.make_node("Unsqueeze", ["level", "axes"], ["steps"]),
        helper.make_node("GRU", ["steps", "w", "r", "b", "", "state"], ["", "stateN"], hidden_size=UNITS),
        helper.make_node("Squeeze", ["stateN", "axes"], ["last"]),
        helper.make_node("Gemm", ["last", "out_w", "out_b"], ["scores"]),
    ]
    shape = [1, "N", UNITS]
    graph = helper.make_graph(
        nodes,
        "bursts",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", CHUNK + LEAD]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, shape),
        ],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("stateN", TensorProto.FLOAT, shape),
        ],
        [numpy_helper.from_array(np.zeros(1, np.int64), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)

    def keep(initializers: dict[str, NDArray[np.float64]]) -> None:
        known = {name: tensor for name, tensor in ((t.name, t) for t in graph.initializer) if name not in initializers}
        del model.graph.initializer[:]
        tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in initializers.items()]
        model.graph.initializer.extend([*known.values(), *tensors])

    keep(weights)
    save(model, path)
    states, wanted = [], []
    for seed in range(40):
        signal, lasting = recording(seed)
        states.append(answers(path, signal)[1])
        wanted.append(lasting)
    inputs, right = np.concatenate(states).astype(np.float64), np.concatenate(wanted)
    inputs = np.concatenate((inputs, np.ones((len(inputs), 1))), axis=1)
    fitted = np.linalg.solve(inputs.T @ inputs + 1e-3 * np.eye(UNITS + 1), inputs.T @ (8.0 * right - 4.0))
    keep(
        {
            **weights,
            "out_w": np.stack((-fitted[:-1], fitted[:-1]), axis=1),
            "out_b": np.array([-fitted[-1], fitted[-1]]),
        }
    )
    save(model, path)
    return path


def answers(path: Path, signal: Floats) -> tuple[Floats, Floats]:
    """Return the model's own answers, computed chunk by chunk in ONNX Runtime alone: scores and states."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    state, found = np.zeros((1, 1, UNITS), np.float32), []
    for frame in frames(signal):
        scores, state = session.run(["scores", "stateN"], {"x": frame[None], "state": state})
        found.append((scores[0], state[0, 0]))
    return np.stack([scores for scores, _ in found]), np.stack([state for _, state in found])


def write_recordings(folder: Path, seeds: range) -> Path:
    """Write recordings as WAV files."""
    folder.mkdir()
    for seed in seeds:
        with wave.open(str(folder / f"{seed:04}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            file.writeframes(np.round(recording(seed)[0] * 32768).astype("<i2").tobytes())
    return folder
