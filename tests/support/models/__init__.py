"""Small ONNX models and samples for tests, valid ones and each kind of invalid one.

A model is written in ONNX's text form (onnx.parser); weights are random with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def model(
    signature: str, body: str, weights: Mapping[str, Any] | None = None, *, opset: int = 17, ir_version: int = 8
) -> Any:
    """Return a ModelProto of `signature` ("float[N,4] x) => (float[N,2] y") and `body`, both in text form."""
    from onnx import numpy_helper, parser

    proto = parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["" : {opset}]> test ({signature}) {{ {body} }}'
    )
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return proto


def mlp(signature: str = "float[N,4] x) => (float[N,3] scores") -> Any:
    body = "h = Gemm(x, w1, b1) r = Relu(h) scores = Gemm(r, w2, b2)"
    weights = {"w1": random(4, 16), "b1": random(16), "w2": random(16, 3, seed=1), "b2": random(3)}
    return model(signature, body, weights)


def cnn() -> Any:
    body = """
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        r = Relu(c)
        g = GlobalAveragePool(r)
        f = Flatten(g)
        scores = Gemm(f, w2, b2)
    """
    weights = {"w1": random(8, 2, 3, 3), "b1": random(8), "w2": random(8, 4), "b2": random(4)}
    return model("float[N,2,6,6] x) => (float[N,4] scores", body, weights)


def transformer() -> Any:
    """Return one attention head over 6 tokens of 8 features, with a norm, in opset 17."""
    body = """
        n = LayerNormalization (x, g, z)
        q = MatMul(n, wq) k = MatMul(n, wk) v = MatMul(n, wv)
        t = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul(q, t) p = Softmax <axis = -1> (s)
        a = MatMul(p, v) r = Add(a, x)
        m = ReduceMean <axes = [1], keepdims = 0> (r)
        scores = Gemm(m, w, b)
    """
    weights = {"g": np.ones(8, np.float32), "z": random(8), "w": random(8, 3), "b": random(3)}
    weights |= {name: random(8, 8, seed=i) / 3 for i, name in enumerate(("wq", "wk", "wv"))}
    return model("float[N,6,8] x) => (float[N,3] scores", body, weights)


def with_outlier(proto: Any, factor: float = 2000.0) -> Any:
    """Return the digits with one channel of the first layer `factor` times as large.

    The next layer divides this channel by `factor`, so the answers in float stay the same. In INT8, the other channels
    are lost, because their values are less than one step.
    """
    from onnx import ModelProto, numpy_helper

    copy = ModelProto()
    copy.CopyFrom(proto)
    weights = {tensor.name: tensor for tensor in copy.graph.initializer}
    arrays = {name: numpy_helper.to_array(weights[name]).copy() for name in ("w1", "b1", "w2")}
    arrays["w1"][0] *= factor
    arrays["b1"][0] *= factor
    arrays["w2"][:, 0] /= factor
    for name, array in arrays.items():
        weights[name].CopyFrom(numpy_helper.from_array(array, name))
    return copy


def two_by_two() -> Any:
    """Return a model of two inputs. Its outputs `total` and `product`, both [N,3], are not class scores."""
    body = "s = Add(a, b) total = MatMul(s, w) product = Mul(a, b)"
    return model("float[N,3] a, float[N,3] b) => (float[N,3] total, float[N,3] product", body, {"w": random(3, 3)})


def dividing() -> Any:
    """Return a model on which ONNX Runtime crashes (SIGFPE) if a value of `x` is truncated to -4.

    The model adds 3 to the truncated value and divides the lowest INT64 by the sum. For the sum -1, the result does not
    fit into INT64, so the processor raises the signal.
    """
    body = """
        s = MatMul(x, w)
        c = Cast <to = 7> (s)
        i = Add(c, three)
        d = Div(low, i)
        e = Div(d, large)
        y = Cast <to = 1> (e)
    """
    low, large, three = np.array([np.iinfo(np.int64).min]), np.array([2**55]), np.array([3])
    weights = {"w": np.eye(4, dtype=np.float32), "low": low, "large": large, "three": three}
    return model("float[N,4] x) => (float[N,4] s, float[N,4] y", body, weights)


def for_dividing(count: int, seed: int = 0) -> Array:
    """Return samples that `dividing` answers in every precision."""
    rng = np.random.default_rng(seed)
    samples: Array = (rng.uniform(9, 114, (count, 4)) * rng.choice([-1, 1], (count, 4))).astype(np.float32)
    samples[0] = [-118.57 + seed, 118.57 - seed, 99, 98]  # INT8 then has steps of 0.93
    return samples


def crashing(samples: Array, *, in_int8_only: bool = False) -> Array:
    """Return `samples` and one more, on which `dividing` crashes. In INT8, its value -5.05 becomes -4.65."""
    return np.concatenate([samples, np.full((1, 4), -5.05 if in_int8_only else -4.5, np.float32)])


def write(proto: Any, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def write_samples(path: Path, **arrays: Array) -> Path:
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path
