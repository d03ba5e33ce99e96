"""Small networks like those on edge devices: FP32 equals ONNX Runtime, and INT8 is close to FP32.

The weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from onnx import TensorProto, helper

from bench.support.architectures import IR_VERSION, OPSET, Graph
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.tflite_cases import Arrays, run_onnx, run_tflite, sqnr_db

SIDE = 32
TOKENS, WIDTH, HEADS, VOCABULARY = 12, 32, 4, 50
ABSOLUTE_TOLERANCE = 1e-4
SAMPLES = 40
ELEMENTS = {"float": TensorProto.FLOAT, "int64": TensorProto.INT64}


@dataclass
class Network:
    """A graph with inputs (dtype and shape without the batch) and outputs by name."""

    graph: Graph
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: list[str]
    batch: int | str = "N"
    sqnr_db_min: float = 25

    def model(self) -> Any:
        inputs = [
            helper.make_tensor_value_info(name, ELEMENTS[kind], [self.batch, *shape])
            for name, (kind, shape) in self.inputs.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in self.outputs]
        for output in outputs:
            output.type.tensor_type.elem_type = TensorProto.FLOAT
        graph = helper.make_graph(self.graph.nodes, "g", inputs, outputs, self.graph.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def arrays(self, batch: int, seed: int) -> Arrays:
        random = np.random.default_rng((seed, batch))
        made: Arrays = {}
        for name, (kind, shape) in self.inputs.items():
            if name == "mask":
                lengths = random.integers(1, shape[0] + 1, (batch, 1))
                made[name] = (np.arange(shape[0])[None] < lengths).astype(np.int64)
            elif kind == "int64":
                made[name] = random.integers(0, VOCABULARY, (batch, *shape))
            else:
                made[name] = random.standard_normal((batch, *shape)).astype(np.float32)
        return made


def ints(graph: Graph, *values: int) -> str:
    return graph.constant(np.array(values, np.int64))


def number(graph: Graph, value: float) -> str:
    return graph.constant(np.array(value, np.float32))


def silu(graph: Graph, x: str) -> str:
    return graph.add("Mul", [x, graph.add("Sigmoid", [x])])


def squeeze_excite(graph: Graph, x: str, width: int, gate: Callable[[str], str]) -> str:
    pooled = graph.add("GlobalAveragePool", [x])
    small = graph.add("Relu", [graph.conv(pooled, width, width // 4, 1)])
    return graph.add("Mul", [x, gate(graph.conv(small, width // 4, width, 1))])


def classified(graph: Graph, x: str, width: int) -> str:
    return graph.gemm(graph.add("Flatten", [graph.add("GlobalAveragePool", [x])]), width, 10)


def mobilenet_v3() -> Network:
    graph = Graph(1)

    def gate(x: str) -> str:
        return graph.add("HardSigmoid", [x], alpha=1 / 6, beta=0.5)

    x, width = graph.add("HardSwish", [graph.conv("x", 3, 16, 3, stride=2)]), 16
    for outputs, kernel, stride, excited in ((16, 3, 2, True), (24, 3, 1, False), (24, 5, 1, True), (40, 5, 2, True)):
        wide = 4 * width
        y = graph.add("HardSwish", [graph.conv(x, width, wide, 1)])
        y = graph.conv(y, wide, wide, kernel, stride, groups=wide)
        y = squeeze_excite(graph, y, wide, gate) if excited else y
        y = graph.conv(graph.add("HardSwish", [y]), wide, outputs, 1, gain=1.0)
        x, width = (graph.add("Add", [x, y]) if stride == 1 and outputs == width else y), outputs
    x = graph.add("HardSwish", [graph.conv(x, width, 96, 1)])
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, [classified(graph, x, 96)])


def efficientnet() -> Network:
    graph = Graph(2)
    x, width = silu(graph, graph.conv("x", 3, 16, 3, stride=2)), 16
    for outputs, kernel, stride in ((16, 3, 1), (24, 3, 2), (24, 3, 1), (40, 5, 2)):
        wide = 4 * width
        y = silu(graph, graph.conv(x, width, wide, 1))
        y = silu(graph, graph.conv(y, wide, wide, kernel, stride, groups=wide))
        y = squeeze_excite(graph, y, wide, lambda v: graph.add("Sigmoid", [v]))
        y = graph.conv(y, wide, outputs, 1, gain=1.0)
        x, width = (graph.add("Add", [x, y]) if stride == 1 and outputs == width else y), outputs
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, [classified(graph, x, width)])


def yolo() -> Network:
    """A network with a split backbone, pools in a row, an up-sampled neck, and a head with means over bins."""
    graph, bins, classes = Graph(3), 8, 5

    def split_block(x: str, width: int) -> str:
        both = silu(graph, graph.conv(x, width, width, 1))
        halves = [f"{both}_{half}" for half in "ab"]
        graph.nodes.append(helper.make_node("Split", [both], halves, f"{both}_split", axis=1))
        deeper = silu(graph, graph.conv(halves[1], width // 2, width // 2, 3))
        joined = graph.add("Concat", [*halves, graph.add("Add", [halves[1], deeper])], axis=1)
        return silu(graph, graph.conv(joined, width // 2 * 3, width, 1))

    fine = split_block(silu(graph, graph.conv("x", 3, 16, 3, stride=2)), 16)
    coarse = split_block(silu(graph, graph.conv(fine, 16, 32, 3, stride=2)), 32)
    pools = [silu(graph, graph.conv(coarse, 32, 16, 1))]
    for _ in range(3):
        pools.append(graph.add("MaxPool", [pools[-1]], kernel_shape=[5, 5], pads=[2, 2, 2, 2]))
    coarse = silu(graph, graph.conv(graph.add("Concat", pools, axis=1), 64, 32, 1))
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    larger = graph.add("Resize", [coarse, "", scales], mode="nearest", coordinate_transformation_mode="asymmetric")
    fine = split_block(graph.add("Concat", [larger, fine], axis=1), 48)
    rows = []
    for x, width, side in ((fine, 48, SIDE // 2), (coarse, 32, SIDE // 4)):
        head = graph.conv(x, width, 4 * bins + classes, 1)
        rows.append(graph.add("Reshape", [head, ints(graph, 0, 4 * bins + classes, side * side)]))
    whole, places = graph.add("Concat", rows, axis=2), (SIDE // 2) ** 2 + (SIDE // 4) ** 2
    parts = [f"{whole}_{part}" for part in ("boxes", "classes")]
    sizes = ints(graph, 4 * bins, classes)
    graph.nodes.append(helper.make_node("Split", [whole, sizes], parts, "heads", axis=1))
    spread = graph.add("Reshape", [parts[0], ints(graph, 0, 4, bins, places)])
    chances = graph.add("Softmax", [graph.add("Transpose", [spread], perm=[0, 2, 1, 3])], axis=1)
    weights = graph.constant(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
    distances = graph.add("Reshape", [graph.add("Conv", [chances, weights]), ints(graph, 0, 4, places)])
    sides = [f"{distances}_{side}" for side in "lr"]
    graph.nodes.append(helper.make_node("Split", [distances], sides, "sides", axis=1))
    anchors = graph.random(1, 2, places, std=8)
    low, high = graph.add("Sub", [anchors, sides[0]]), graph.add("Add", [anchors, sides[1]])
    middle = graph.add("Div", [graph.add("Add", [low, high]), number(graph, 2)])
    boxes = graph.add("Concat", [middle, graph.add("Sub", [high, low])], axis=1)
    scores = graph.add("Sigmoid", [parts[1]])
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, [boxes, scores])


def unet() -> Network:
    graph = Graph(4)

    def block(x: str, inputs: int, outputs: int) -> str:
        x = graph.add("Relu", [graph.conv(x, inputs, outputs, 3)])
        return graph.add("Relu", [graph.conv(x, outputs, outputs, 3)])

    skips, x, width = [], "x", 3
    for outputs in (8, 16):
        skips.append(block(x, width, outputs))
        x, width = graph.add("MaxPool", [skips[-1]], kernel_shape=[2, 2], strides=[2, 2]), outputs
    x, width = block(x, width, 32), 32
    for skip, outputs in zip(reversed(skips), (16, 8), strict=True):
        kernel = graph.random(width, outputs, 2, 2, std=(1 / width) ** 0.5)
        x = graph.add("ConvTranspose", [x, kernel, graph.random(outputs, std=0.05)], strides=[2, 2])
        x, width = block(graph.add("Concat", [x, skip], axis=1), 2 * outputs, outputs), outputs
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, [graph.add("Sigmoid", [graph.conv(x, width, 1, 1)])])


def plain_norm(graph: Graph, x: str) -> str:
    """A LayerNormalization in the operators that exporters write before opset 17."""
    centred = graph.add("Sub", [x, graph.add("ReduceMean", [x], axes=[-1])])
    squares = graph.add("ReduceMean", [graph.add("Pow", [centred, number(graph, 2)])], axes=[-1])
    deviation = graph.add("Sqrt", [graph.add("Add", [squares, number(graph, 1e-5)])])
    scaled = graph.add("Mul", [graph.add("Div", [centred, deviation]), graph.constant(np.ones(WIDTH, np.float32))])
    return graph.add("Add", [scaled, graph.random(WIDTH, std=0.05)])


def plain_gelu(graph: Graph, x: str) -> str:
    bent = graph.add("Erf", [graph.add("Div", [x, number(graph, 2**0.5)])])
    return graph.add("Mul", [graph.add("Mul", [x, graph.add("Add", [bent, number(graph, 1)])]), number(graph, 0.5)])


def attention(graph: Graph, x: str, tokens: int, mask: str = "") -> str:
    shape = ints(graph, 0, tokens, HEADS, WIDTH // HEADS)
    heads = [graph.add("Reshape", [graph.linear(x, WIDTH, WIDTH), shape]) for _ in range(3)]
    q, v = (graph.add("Transpose", [head], perm=[0, 2, 1, 3]) for head in heads[::2])
    k = graph.add("Transpose", [heads[1]], perm=[0, 2, 3, 1])
    scores = graph.add("Div", [graph.add("MatMul", [q, k]), number(graph, (WIDTH // HEADS) ** 0.5)])
    scores = graph.add("Add", [scores, mask]) if mask else scores
    mixed = graph.add("MatMul", [graph.add("Softmax", [scores], axis=-1), v])
    flat = graph.add("Reshape", [graph.add("Transpose", [mixed], perm=[0, 2, 1, 3]), ints(graph, 0, tokens, WIDTH)])
    return graph.linear(flat, WIDTH, WIDTH)


def encoder(graph: Graph, x: str, tokens: int, mask: str = "") -> str:
    for _ in range(2):
        x = graph.add("Add", [x, attention(graph, plain_norm(graph, x), tokens, mask)])
        wide = plain_gelu(graph, graph.linear(plain_norm(graph, x), WIDTH, 2 * WIDTH))
        x = graph.add("Add", [x, graph.linear(wide, 2 * WIDTH, WIDTH)])
    return plain_norm(graph, x)


def vision_transformer() -> Network:
    graph, patch = Graph(5), 8
    count = (SIDE // patch) ** 2
    patches = graph.add(
        "Conv",
        ["x", graph.random(WIDTH, 3, patch, patch, std=0.07)],
        strides=[patch, patch],
        kernel_shape=[patch, patch],
    )
    flat = graph.add("Transpose", [graph.add("Reshape", [patches, ints(graph, 0, WIDTH, count)])], perm=[0, 2, 1])
    items = graph.add("Slice", [graph.add("Shape", ["x"]), ints(graph, 0), ints(graph, 1)])
    shape = graph.add("Concat", [items, ints(graph, 1, WIDTH)], axis=0)
    token = graph.add("Expand", [graph.random(1, 1, WIDTH, std=1.0), shape])
    x = graph.add("Add", [graph.add("Concat", [token, flat], axis=1), graph.random(1, count + 1, WIDTH, std=0.5)])
    first = graph.add("Gather", [encoder(graph, x, count + 1), graph.constant(np.array(0, np.int64))], axis=1)
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, [graph.gemm(first, WIDTH, 10)], sqnr_db_min=22)


def text_classifier() -> Network:
    graph = Graph(6)
    words = graph.add("Gather", [graph.random(VOCABULARY, WIDTH, std=1.0), "ids"])
    x = plain_norm(graph, graph.add("Add", [words, graph.random(1, TOKENS, WIDTH, std=0.5)]))
    wide = graph.add("Unsqueeze", [graph.add("Cast", ["mask"], to=TensorProto.FLOAT), ints(graph, 1, 2)])
    lowest = number(graph, float(np.finfo(np.float32).min))
    mask = graph.add("Mul", [graph.add("Sub", [number(graph, 1), wide]), lowest])
    first = graph.add("Gather", [encoder(graph, x, TOKENS, mask), graph.constant(np.array(0, np.int64))], axis=1)
    pooled = graph.add("Tanh", [graph.gemm(first, WIDTH, WIDTH)])
    inputs: dict[str, tuple[str, tuple[int, ...]]] = {"ids": ("int64", (TOKENS,)), "mask": ("int64", (TOKENS,))}
    return Network(graph, inputs, [graph.gemm(pooled, WIDTH, 3)], sqnr_db_min=20)


def centre_detector() -> Network:
    """A detector that looks up class and size at the best positions of a heat map, with computed indices."""
    graph, classes, best, places = Graph(7), 4, 6, (SIDE // 2) ** 2
    x = graph.add("Relu", [graph.conv("x", 3, 16, 3, stride=2)])
    heat = graph.add("Sigmoid", [graph.conv(x, 16, classes, 1)])
    peaks = graph.add("MaxPool", [heat], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    kept = graph.add("Mul", [heat, graph.add("Cast", [graph.add("Equal", [peaks, heat])], to=TensorProto.FLOAT)])
    flat = graph.add("Reshape", [kept, ints(graph, 1, classes * places)])
    graph.nodes.append(helper.make_node("TopK", [flat, ints(graph, best)], ["scores", "found"], "best"))
    kind = graph.add("Cast", [graph.add("Div", ["found", ints(graph, places)])], to=TensorProto.FLOAT)
    place = graph.add("Unsqueeze", [graph.add("Mod", ["found", ints(graph, places)]), ints(graph, 1)])
    sizes = graph.add("Reshape", [graph.conv(x, 16, 2, 1), ints(graph, 1, 2, places)])
    looked_up = graph.add("GatherElements", [sizes, graph.add("Expand", [place, ints(graph, 1, 2, best)])], axis=2)
    return Network(graph, {"x": ("float", (3, SIDE, SIDE))}, ["scores", kind, looked_up], batch=1)


NETWORKS = [mobilenet_v3, efficientnet, yolo, unet, vision_transformer, text_classifier, centre_detector]


@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_the_float_network_gives_the_answers_of_onnx_runtime(build: Callable[[], Network]) -> None:
    network = build()
    content = lower(network.model())
    for batch in (1, 3) if network.batch == "N" else (1,):
        inputs = network.arrays(batch, seed=9)
        for got, wanted in zip(run_tflite(content, inputs), run_onnx(network.model(), inputs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=ABSOLUTE_TOLERANCE)


# Decibels do not measure whether the best positions are the same.
@pytest.mark.parametrize("build", NETWORKS[:-1], ids=lambda build: build.__name__)
def test_the_int8_network_gives_answers_close_to_those_in_float(build: Callable[[], Network]) -> None:
    network = build()
    content = lower(network.model())
    quantized = quantize_int8(content, [list(network.arrays(1, seed).values()) for seed in range(SAMPLES)])
    inputs = network.arrays(8, seed=1000)
    for wanted, got in zip(run_tflite(content, inputs), run_tflite(quantized, inputs), strict=True):
        assert sqnr_db(wanted, got) >= network.sqnr_db_min
