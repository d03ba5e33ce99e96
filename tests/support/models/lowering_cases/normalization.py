"""Normalizations."""

from __future__ import annotations

import numpy as np

from tests.support.models.tflite_cases import IMAGE, SIGNAL, TOKENS, VOLUME, Case, random

CASES = [
    Case(
        "batch normalization folded",
        "c = Conv(x, w) y = BatchNormalization(c, s, b, m, v)",
        IMAGE,
        {"w": random(6, 4, 3, 3), "s": random(6), "b": random(6), "m": random(6), "v": np.abs(random(6)) + 1},
    ),
    Case(
        "batch normalization alone",
        "r = Relu(x) n = BatchNormalization(r, s, b, m, v) y = Relu(n)",
        IMAGE,
        {"s": random(4), "b": random(4), "m": random(4), "v": np.abs(random(4)) + 1},
    ),
    Case(
        "batch normalization channels last",
        "c = Conv(x, w) r = Relu(c) y = BatchNormalization(r, s, b, m, v)",
        IMAGE,
        {"w": random(6, 4, 3, 3), "s": random(6), "b": random(6), "m": random(6), "v": np.abs(random(6)) + 1},
    ),
    Case("layer normalization", "y = LayerNormalization(x, s, b)", TOKENS, {"s": random(8), "b": random(8)}),
    Case("layer normalization no bias", "y = LayerNormalization<axis=1>(x, s)", TOKENS, {"s": random(5, 8)}),
    Case(
        "layer normalization spelled out",
        "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes=[-1]>(p) e = Add(v, eps)"
        "r = Sqrt(e) n = Div(d, r) t = Mul(n, s) y = Add(t, b)",
        TOKENS,
        {"two": np.float32(2), "eps": np.float32(1e-5), "s": random(8), "b": random(8)},
    ),
    Case("softmax", "y = Softmax(x)", TOKENS),
    Case("softmax axis 1", "y = Softmax<axis=1>(x)", TOKENS),
    Case("softmax channels", "c = Conv(x, w) y = Softmax<axis=1>(c)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case("softmax rows", "c = Conv(x, w) y = Softmax<axis=2>(c)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case("softmax of opset 11", "y = Softmax<axis=2>(x)", TOKENS, opset=11),
    Case("log softmax", "y = LogSoftmax(x)", TOKENS),
    Case("instance normalization", "y = InstanceNormalization(x, s, b)", IMAGE, {"s": random(4), "b": random(4)}),
    Case(
        "instance normalization channels last",
        "c = Conv(x, w) y = InstanceNormalization(c, s, b)",
        SIGNAL,
        {"w": random(6, 4, 3), "s": random(6), "b": random(6)},
    ),
    Case(
        "group normalization",
        "y = GroupNormalization<num_groups=2>(x, s, b)",
        IMAGE,
        {"s": random(4), "b": random(4)},
        opset=21,
    ),
    Case(
        "group normalization opset 18",
        "y = GroupNormalization<num_groups=2>(x, s, b)",
        IMAGE,
        {"s": random(2), "b": random(2)},
        opset=18,
    ),
    Case("layer normalization of volumes", "y = LayerNormalization<axis=-2>(x, s)", IMAGE, {"s": random(7, 9)}),
    Case(
        "layer normalization mean",
        "n, m, i = LayerNormalization(x, s, b) a = Add(n, m) y = Mul(a, i)",
        TOKENS,
        {"s": random(8), "b": random(8)},
    ),
    *(
        Case(
            f"rms normalization {axis}", f"y = RMSNormalization<axis={axis}>(x, s)", TOKENS, {"s": random(*s)}, opset=23
        )
        for axis, s in [(-1, (8,)), (1, (5, 8))]
    ),
    *(
        Case(f"lp normalization {p} {axis}", f"y = LpNormalization<p={p}, axis={axis}>(x)", TOKENS)
        for p, axis in [(1, -1), (1, 1), (2, -1), (2, 1)]
    ),
    Case("mean variance normalization", "y = MeanVarianceNormalization<axes=[2,3]>(x)", IMAGE),
    Case(
        "batch normalization 3-D",
        "r = Relu(x) p = MaxPool<kernel_shape=[2,2,2]>(r) y = BatchNormalization(p, s, b, m, v)",
        VOLUME,
        {"s": random(4), "b": random(4), "m": random(4), "v": np.abs(random(4)) + 1},
    ),
    Case(
        "batch normalization of features",
        "r = Relu(x) y = BatchNormalization(r, s, b, m, v)",
        {"x": (4,)},
        {"s": random(4), "b": random(4), "m": random(4), "v": np.abs(random(4)) + 1},
    ),
    Case("local response normalization", "y = LRN<size=3, alpha=0.3, beta=0.6, bias=1.5>(x)", IMAGE),
    Case("instance normalization 3-D", "y = InstanceNormalization(x, s, b)", VOLUME, {"s": random(4), "b": random(4)}),
]
