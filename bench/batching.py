"""The gain and cost of batching: fixed caps with one run at a time, and the learned cap.

Real ONNX Runtime models with random weights run in the real daemon and answer client processes. The model `dense`, a
fully connected layer with 33 MB of weights, gains from batches. The model `conv`, INT8 convolutions, does not. The
other models are the models of `bench.peers`. Each setting has its own daemon, and all daemons run at once. The rounds
of all settings are interleaved in a rotating order, and a figure is the median over the rounds. The cache is off, so
every request reaches the engine. All daemons have the same number of engine threads.

`cpu_us` is the worker's processor time per request, which other work on the machine hardly changes. `cpu_of_best` is
this time divided by the time of the best fixed cap. `of_batch_1` is the rate divided by the rate of cap 1. It is the
median of the ratios within each round, because other work on the machine changes from round to round. `of_best` is the
median rate divided by the median rate of the best fixed cap.

    python -m bench.batching            # a table
    python -m bench.batching --json     # JSON lines
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.architectures import ARCHITECTURES, item_shape, samples
from bench.support.bundles import make_bundle
from bench.support.clients import Clients, Load, median_load, ours
from bench.support.devices import deploy, edgertd, start, state_folder
from bench.support.processes import cpu_us
from bench.support.tables import emit
from edgert.bundle.signing import SigningKey, new_key

SETTINGS = {"cap 1": 1, "cap 8": 8, "cap 32": 32, "learned": 0}
MODELS = ("dense", "conv", *ARCHITECTURES)
COLUMNS = (
    "model",
    "clients",
    "setting",
    "cap",
    "threads",
    "instances",
    "requests_per_s",
    "p50_us",
    "p99_us",
    "batch_mean",
    "of_batch_1",
    "of_best",
    "cpu_us",
    "cpu_of_best",
)
DENSE = (1024, 8192)
CONV_CHANNELS, CONV_LAYERS, CONV_SIZE = 32, 4, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.8, help="length of one round of one setting")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="engine threads of every daemon")
    parser.add_argument("--models", nargs="+", default=["dense", "conv"], choices=MODELS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with daemons(model, options.threads) as states:
            for clients in options.clients:
                print(f"{model}, {clients} clients", file=sys.stderr)
                rows += measure(model, states, clients, options.rounds, options.seconds)
    if not options.json:
        rows = [
            {**row, **{name: f"{row[name]:.2f}" for name in ("of_batch_1", "of_best", "cpu_of_best")}} for row in rows
        ]
    emit(rows, COLUMNS, options.json)


def measure(model: str, states: dict[str, Path], clients: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    item = sample(model)
    groups = {name: Clients(clients, ours(state, model, item)) for name, state in states.items()}
    loads: dict[str, list[Load]] = {name: [] for name in groups}
    before = {name: served(state) for name, state in states.items()}
    names = list(groups)
    spent_us = dict.fromkeys(names, 0.0)
    for number in range(rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            pids = [before[name]["pid"]]
            spent_us[name] -= cpu_us(pids)
            loads[name].append(groups[name].round(seconds))
            spent_us[name] += cpu_us(pids)
    for group in groups.values():
        group.close()
    after = {name: served(state) for name, state in states.items()}
    fixed = [name for name in names if SETTINGS[name]]
    each_us = {name: spent_us[name] / sum(load.requests_per_s * seconds for load in loads[name]) for name in names}
    rows = []
    for name in names:
        load = median_load(loads[name])
        serving = after[name]
        rates = [one.requests_per_s for one in loads[name]]
        best = [max(loads[f][i].requests_per_s for f in fixed) for i in range(rounds)]
        first = [one.requests_per_s for one in loads["cap 1"]]
        requests = serving["requests"]["requests"] - before[name]["requests"]["requests"]
        runs = sum(serving["batches_closed"].values()) - sum(before[name]["batches_closed"].values())
        rows.append(
            {
                "model": model,
                "clients": clients,
                "setting": name,
                "cap": serving["batch_cap"],
                "threads": serving["threads"],
                "instances": serving["instances"],
                "requests_per_s": round(load.requests_per_s),
                "p50_us": round(load.p50_us),
                "p99_us": round(load.p99_us),
                "batch_mean": round(requests / max(1, runs), 2),
                "of_batch_1": round(statistics.median(a / b for a, b in zip(rates, first, strict=True)), 3),
                # Noise favours the best of several equal settings, so medians are compared, not single rounds.
                "of_best": round(
                    statistics.median(rates)
                    / max(statistics.median(one.requests_per_s for one in loads[f]) for f in fixed),
                    3,
                ),
                "cpu_us": round(each_us[name], 1),
                "cpu_of_best": round(each_us[name] / min(each_us[f] for f in fixed), 3),
                "of_best_by_round": round(statistics.median(a / b for a, b in zip(rates, best, strict=True)), 3),
                "closed": serving["batches_closed"],
            }
        )
    return rows


def served(state: Path) -> dict[str, Any]:
    """Return the daemon's status of its model."""
    return dict(edgertd(state, "status")["models"][0]["serving"])


@contextmanager
def daemons(model: str, threads: int) -> Iterator[dict[str, Path]]:
    """Run a daemon that serves `model` for each setting. Yield the state folders, which are removed afterwards."""
    with ExitStack() as stack:
        states = {name: stack.enter_context(state_folder()) for name in SETTINGS}
        key = new_key()
        bundle = make_model(states["cap 1"].parent, model, key)
        for name, state in states.items():
            start(state, key.public.pem(), _config(SETTINGS[name], threads))
            deploy(state, model, bundle)
        yield states


def _config(cap: int, threads: int) -> str:
    fixed = f"batch_max = {cap}\ninstances = 1\n" if cap else ""
    return f"[serving]\nthreads = {threads}\n{fixed}"


def sample(model: str) -> NDArray[Any]:
    if model in ARCHITECTURES:
        return samples(item_shape(ARCHITECTURES[model]()), 1, 0)
    rng = np.random.default_rng(0)
    if model == "dense":
        return rng.standard_normal((1, DENSE[0])).astype(np.float32)
    return rng.integers(0, 256, (1, 3, CONV_SIZE, CONV_SIZE), dtype=np.uint8)


def make_model(folder: Path, model: str, key: SigningKey) -> Path:
    """Make a signed bundle of the model. This process computes the golden answers."""
    import onnxruntime

    if model in ARCHITECTURES:
        program = bytes(ARCHITECTURES[model]().SerializeToString(deterministic=True))
    else:
        program = dense_model() if model == "dense" else conv_model()
    item = sample(model)
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    answer, output = session.run(None, {"x": item})[0], session.get_outputs()[0].name
    precision = "int8" if model == "conv" else "fp32"
    return make_bundle(folder, key, model, "onnxruntime", program, item, answer, precision=precision, output=output)


def dense_model() -> bytes:
    """Return one fully connected layer with 33 MB of FP32 weights and ten outputs."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(1)
    wide = numpy_helper.from_array((rng.standard_normal(DENSE) / 32).astype(np.float32), "w1")
    narrow = numpy_helper.from_array((rng.standard_normal((DENSE[1], 10)) / 90).astype(np.float32), "w2")
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    return _serialized(nodes, [wide, narrow], ("x", TensorProto.FLOAT, ["n", DENSE[0]]), [wide, narrow])


def conv_model() -> bytes:
    """Return convolutions as the packager quantizes them: QLinearConv, UINT8 activations, INT8 weights."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(2)
    values: list[Any] = [
        numpy_helper.from_array(np.float32(1 / 64), "s"),
        numpy_helper.from_array(np.uint8(128), "z"),
        numpy_helper.from_array(np.float32(1 / 512), "ws"),
        numpy_helper.from_array(np.int8(0), "wz"),
    ]
    nodes, last, channels = [], "x", 3
    for layer in range(CONV_LAYERS):
        weights = rng.integers(-40, 40, (CONV_CHANNELS, channels, 3, 3)).astype(np.int8)
        values.append(numpy_helper.from_array(weights, f"w{layer}"))
        given = [last, "s", "z", f"w{layer}", "ws", "wz", "s", "z"]
        nodes.append(helper.make_node("QLinearConv", given, [f"c{layer}"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
        last, channels = f"c{layer}", CONV_CHANNELS
    nodes.append(helper.make_node("DequantizeLinear", [last, "s", "z"], ["f"]))
    nodes.append(helper.make_node("GlobalAveragePool", ["f"], ["g"]))
    nodes.append(helper.make_node("Flatten", ["g"], ["y"]))
    return _serialized(nodes, values, ("x", TensorProto.UINT8, ["n", 3, CONV_SIZE, CONV_SIZE]), values)


def _serialized(
    nodes: list[Any], values: list[Any], given: tuple[str, int, list[Any]], initializer: list[Any]
) -> bytes:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info(*given)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", None])],
        initializer=initializer,
    )
    # Every supported ONNX Runtime reads IR 9 and operator set 17.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
