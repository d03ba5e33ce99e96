"""Make the example of a sensor model: the state of a machine from its vibration.

The script synthesises recordings of a three-axis accelerometer by the usual formulas of machine diagnostics, trains a
small network on the features that `features.toml` describes, and writes into a folder (its own, or the given one):
`vibration.onnx`, `calibration/` and `holdout/` with a CSV file for each recording, and `labels.txt`. It takes seconds.

    python examples/vibration/make.py [FOLDER]
    edgert build examples/vibration/vibration.toml

A healthy machine shows little more than noise. Imbalance shakes it once a turn, misalignment twice a turn and along the
axis. A damaged bearing rings at a resonance of the housing, each time that a ball passes the damage.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HERE = Path(__file__).parent
LABELS = ("healthy", "imbalance", "misalignment", "bearing")
RATE_HZ, LENGTH, AXES = 3200, 1024, 3
BALLS, BALL_SHARE = 9, 0.3  # balls of the bearing, their diameter as a share of the pitch's
RESONANCE_HZ, DAMPING_HZ = 1100.0, 180.0
TRAINED, CALIBRATION, HOLDOUT = 400, 30, 80  # recordings of each state
HIDDEN, EPOCHS, LEARNING_RATE = 24, 300, 3e-3
ACCURACY_MIN = 0.97


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(11)
    trained, labels = recordings(random, TRAINED)
    network = train(features(trained), labels, random)
    held, truth = recordings(random, HOLDOUT)
    accuracy = float((scores(network, features(held)).argmax(axis=1) == truth).mean())
    print(f"hold-out accuracy {accuracy:.4f} on {len(held)} recordings")
    if accuracy < ACCURACY_MIN:
        print(f"below {ACCURACY_MIN}: no file was written", file=sys.stderr)
        return 1
    write_onnx(network, folder / "vibration.onnx")
    write_csv(folder / "calibration", *recordings(random, CALIBRATION))
    write_csv(folder / "holdout", held, truth)
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    return 0


def recordings(random: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Return `count` recordings of each state, FP32 [N, LENGTH, AXES] in m/s2, and the states INT64 [N]."""
    labels = np.repeat(np.arange(len(LABELS)), count)
    made = [recording(random, LABELS[label]) for label in labels]
    return np.stack(made).astype(np.float32), labels


def recording(random: np.random.Generator, state: str) -> Array:
    time_s = np.arange(LENGTH)[:, None] / RATE_HZ
    turns_hz = random.uniform(24, 32)
    phase, level = random.uniform(0, 2 * np.pi, 2), random.uniform(0.7, 1.4)
    signal = random.normal(0, 0.4, (LENGTH, AXES)) + [0, 0, 9.81]
    turn = 2 * np.pi * turns_hz * time_s
    signal += 0.25 * np.sin(turn + phase[0]) * [1, 0.9, 0.2]  # no rotor is balanced perfectly
    if state == "imbalance":
        signal += 2.5 * level * np.concatenate([np.sin(turn + phase[1]), np.cos(turn + phase[1]), 0 * turn], axis=1)
    elif state == "misalignment":
        signal += 1.8 * level * np.sin(2 * turn + phase[1]) * [0.6, 0.6, 1.0]
    elif state == "bearing":
        passes_hz = BALLS / 2 * turns_hz * (1 - BALL_SHARE)  # the rate at which balls pass a damage of the outer race
        since_s = np.mod(time_s + random.uniform(0, 1) / passes_hz, 1 / passes_hz)
        ring = np.exp(-DAMPING_HZ * 2 * since_s) * np.sin(2 * np.pi * RESONANCE_HZ * since_s)
        signal += 5.0 * level * ring * [1.0, 0.8, 0.3]
    return np.asarray(signal)


def features(signals: Array) -> Array:
    """Return the features that a device computes from `signals` by features.toml: FP32 [N, AXES, features]."""
    from edgert.bundle.signal_rules import Series
    from edgert.processing.signals.preprocess import SignalPreprocessor
    from edgert.tensors import TensorSpec
    from edgert_deploy.packager.samples.processing import read_preprocess
    from edgert_deploy.packager.sources.source_model import SourceModel

    spec = TensorSpec("features", "FP32", (-1, AXES, 17))
    rule = read_preprocess(HERE / "features.toml", SourceModel(HERE, None, "0" * 64, 1, (spec,), ()))
    assert isinstance(rule, Series)
    return SignalPreprocessor(rule, spec).features(signals)


def train(inputs: Array, labels: Array, random: np.random.Generator) -> dict[str, Array]:
    """Minimise the cross-entropy of two layers by Adam (Kingma and Ba 2015), over all samples at once."""
    flat = inputs.reshape(len(inputs), -1)
    network = {
        "w1": random.normal(0, np.sqrt(2 / flat.shape[1]), (HIDDEN, flat.shape[1])),
        "b1": np.zeros(HIDDEN),
        "w2": random.normal(0, np.sqrt(2 / HIDDEN), (len(LABELS), HIDDEN)),
        "b2": np.zeros(len(LABELS)),
    }
    first, second = ({name: np.zeros_like(w) for name, w in network.items()} for _ in range(2))
    for step in range(1, EPOCHS + 1):
        hidden = np.maximum(flat @ network["w1"].T + network["b1"], 0)
        logits = hidden @ network["w2"].T + network["b2"]
        slope = np.exp(logits - logits.max(axis=1, keepdims=True))
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(len(labels)), labels] -= 1
        slope /= len(labels)
        back = (slope @ network["w2"]) * (hidden > 0)
        slopes = {"w2": slope.T @ hidden, "b2": slope.sum(axis=0), "w1": back.T @ flat, "b1": back.sum(axis=0)}
        for name, gradient in slopes.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            scale = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
            network[name] = network[name] - LEARNING_RATE * first[name] / (1 - 0.9**step) / scale
    return {name: weights.astype(np.float32) for name, weights in network.items()}


def scores(network: dict[str, Array], inputs: Array) -> Array:
    hidden = np.maximum(inputs.reshape(len(inputs), -1) @ network["w1"].T + network["b1"], 0)
    return np.asarray(hidden @ network["w2"].T + network["b2"])


def write_onnx(network: dict[str, Array], path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Flatten", ["features"], ["flat"], "flatten", axis=1),
        helper.make_node("Gemm", ["flat", "w1", "b1"], ["hidden"], "hidden", transB=1),
        helper.make_node("Relu", ["hidden"], ["relu"], "relu"),
        helper.make_node("Gemm", ["relu", "w2", "b2"], ["scores"], "scores", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "vibration",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", AXES, 17])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", len(LABELS)])],
        [numpy_helper.from_array(weights, name) for name, weights in network.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_csv(folder: Path, signals: Array, labels: Array) -> None:
    """Write a file for each recording, in a folder named after its state."""
    shutil.rmtree(folder, ignore_errors=True)
    for i, (signal, label) in enumerate(zip(signals, labels, strict=True)):
        path = folder / LABELS[label] / f"{i:04}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, signal, "%.4f", delimiter=",", header="x,y,z", comments="")


if __name__ == "__main__":
    sys.exit(main())
