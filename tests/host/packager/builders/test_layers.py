"""Layers are quantized as a whole, and the operators of engines are matched to them by name."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert_deploy.packager.builders.layers import belongs, by_name, layers_of
from tests.support import models


def named(proto: object) -> object:
    """Give each node the name of its output, as ONNX Runtime's tools do."""
    for node in proto.graph.node:  # type: ignore[attr-defined]
        node.name = node.output[0]
    return proto


def test_an_activation_belongs_to_the_layer_before_it() -> None:
    layers = layers_of(named(models.cnn()))
    assert [(layer.op, layer.name, layer.values) for layer in layers] == [
        ("Conv", "c", ("c", "r")),
        ("GlobalAveragePool", "g", ("g", "f")),
        ("Gemm", "scores", ("scores",)),
    ]


def test_a_layer_ends_at_a_value_that_two_nodes_read() -> None:
    body = "c = Add(x, x) r = Relu(c) y = Mul(c, r)"
    layers = layers_of(named(models.model("float[N,4] x) => (float[N,4] y", body)))
    assert [layer.values for layer in layers] == [("c",), ("r",), ("y",)]


def test_arithmetic_of_lengths_is_no_layer() -> None:
    """The layer ends where lengths become data, as in positions."""
    body = """
        s = Shape (x)  n = Gather (s, one)  f = Cast <to = 1> (n)  h = Div (f, two)  k = Cast <to = 7> (h)
        z = Range (zero, k, one)  p = Cast <to = 1> (z)  y = Add (x, p)
    """
    weights = {"one": np.int64(1), "zero": np.int64(0), "two": np.float32(2)}
    layers = layers_of(
        named(models.model("float[N,4] x) => (float[N,4] y", body, {k: np.asarray(v) for k, v in weights.items()}))
    )
    assert [layer.name for layer in layers] == ["z", "p", "y"]


def test_layers_are_found_by_the_names_that_engines_give() -> None:
    every = layers_of(named(models.cnn()))
    first = by_name(every, ["c"])
    assert all(belongs(name, first, every) for name in ("c", "c/WithoutBiases", "r", "r_bias"))
    assert not any(belongs(name, first, every) for name in ("g", "c1", "scores"))
