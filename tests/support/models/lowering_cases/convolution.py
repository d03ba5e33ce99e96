"""Convolutions and pools."""

from __future__ import annotations

import numpy as np

from tests.support.models.tflite_cases import IMAGE, SIGNAL, VOLUME, Case, random

CASES = [
    # convolution
    Case("conv 3x3 padded", "y = Conv<pads=[1,1,1,1]>(x, w, b)", IMAGE, {"w": random(6, 4, 3, 3), "b": random(6)}),
    Case("conv no bias", "y = Conv(x, w)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case("conv 1x1", "y = Conv(x, w)", IMAGE, {"w": random(6, 4, 1, 1)}),
    Case("conv stride 2", "y = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case(
        "conv even size", "y = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", {"x": (4, 8, 8)}, {"w": random(6, 4, 3, 3)}
    ),
    Case("conv lopsided pads", "y = Conv<pads=[2,0,1,3]>(x, w)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case("conv dilated", "y = Conv<dilations=[2,2], pads=[2,2,2,2]>(x, w)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case("conv same upper", 'y = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', IMAGE, {"w": random(6, 4, 4, 4)}),
    Case("conv same lower", 'y = Conv<auto_pad="SAME_LOWER", strides=[2,2]>(x, w)', IMAGE, {"w": random(6, 4, 4, 4)}),
    Case("conv valid", 'y = Conv<auto_pad="VALID">(x, w)', IMAGE, {"w": random(6, 4, 2, 3)}),
    Case("conv depthwise", "y = Conv<group=4, pads=[1,1,1,1]>(x, w)", IMAGE, {"w": random(4, 1, 3, 3)}),
    Case("conv depthwise x2", "y = Conv<group=4, pads=[1,1,1,1]>(x, w)", IMAGE, {"w": random(8, 1, 3, 3)}),
    Case(
        "conv grouped", "y = Conv<group=2, pads=[1,1,1,1]>(x, w, b)", IMAGE, {"w": random(6, 2, 3, 3), "b": random(6)}
    ),
    Case("conv 1-D", "y = Conv<pads=[1,1]>(x, w)", SIGNAL, {"w": random(6, 4, 3)}),
    Case("conv 1-D stride", "y = Conv<pads=[2,0], strides=[2], dilations=[2]>(x, w)", SIGNAL, {"w": random(6, 4, 3)}),
    Case("conv 1-D depthwise", "y = Conv<group=4>(x, w)", SIGNAL, {"w": random(4, 1, 3)}),
    Case("conv 1-D grouped", "y = Conv<group=2>(x, w)", SIGNAL, {"w": random(6, 2, 3)}),
    Case("conv relu", "c = Conv(x, w) y = Relu(c)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case(
        "conv relu6",
        "c = Conv(x, w) y = Clip(c, z, s)",
        IMAGE,
        {"w": random(6, 4, 3, 3), "z": np.float32(0), "s": np.float32(6)},
    ),
    Case("conv relu shared", "c = Conv(x, w) r = Relu(c) y = Add(c, r)", IMAGE, {"w": random(4, 4, 1, 1)}),
    Case(
        "conv transpose", "y = ConvTranspose<strides=[2,2]>(x, w, b)", IMAGE, {"w": random(4, 5, 2, 2), "b": random(5)}
    ),
    Case(
        "conv transpose overlapping",
        "y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w)",
        IMAGE,
        {"w": random(4, 5, 3, 3)},
    ),
    Case(
        "conv transpose 4x4", "y = ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, w)", IMAGE, {"w": random(4, 5, 4, 4)}
    ),
    Case("conv transpose stride 3", "y = ConvTranspose<strides=[3,3]>(x, w)", IMAGE, {"w": random(4, 5, 2, 5)}),
    Case("conv transpose dilated", "y = ConvTranspose<dilations=[2,1]>(x, w)", IMAGE, {"w": random(4, 5, 3, 3)}),
    Case(
        "conv transpose 1-D",
        "y = ConvTranspose<strides=[2], pads=[1,0]>(x, w, b)",
        SIGNAL,
        {"w": random(4, 5, 5), "b": random(5)},
    ),
    Case(
        "conv grouped x5", "y = Conv<group=5>(x, w, b)", {"x": (10, 4, 5)}, {"w": random(15, 2, 3, 3), "b": random(15)}
    ),
    Case(
        "conv 3-D",
        "y = Conv<pads=[1,0,1,1,2,1], strides=[2,1,2]>(x, w, b)",
        VOLUME,
        {"w": random(6, 4, 3, 3, 2), "b": random(6)},
    ),
    Case("conv 3-D dilated", "c = Conv<dilations=[1,2,1]>(x, w) y = Relu(c)", VOLUME, {"w": random(6, 4, 2, 2, 3)}),
    Case("conv 3-D grouped", "y = Conv<group=2>(x, w, b)", VOLUME, {"w": random(6, 2, 3, 3, 2), "b": random(6)}),
    Case(
        "conv 3-D block",
        "c = Conv<pads=[1,1,1,1,1,1]>(x, w) n = Mul(c, s) r = Relu(n) p = MaxPool<kernel_shape=[2,2,2]>(r) a = Add(p, p)"
        "g = GlobalAveragePool(a) f = Flatten(g) y = Gemm(f, v)",
        VOLUME,
        {"w": random(6, 4, 3, 3, 3), "s": random(6, 1, 1, 1), "v": random(6, 5)},
    ),
    Case(
        "conv transpose grouped",
        "y = ConvTranspose<group=2, strides=[2,2], pads=[1,1,1,1]>(x, w, b)",
        IMAGE,
        {"w": random(4, 3, 3, 3), "b": random(6)},
    ),
    Case(
        "conv transpose depthwise", "y = ConvTranspose<group=4, strides=[2,2]>(x, w)", IMAGE, {"w": random(4, 1, 3, 3)}
    ),
    Case(
        "conv transpose two strides",
        "y = ConvTranspose<strides=[3,2], dilations=[2,1], pads=[0,1,2,0]>(x, w, b)",
        IMAGE,
        {"w": random(4, 5, 3, 3), "b": random(5)},
    ),
    Case(
        "conv transpose output shape",
        "y = ConvTranspose<strides=[3,2], output_shape=[23,19]>(x, w)",
        IMAGE,
        {"w": random(4, 5, 3, 3)},
    ),
    *(
        Case(
            f"conv transpose {scheme}",
            f'y = ConvTranspose<strides=[2,2], auto_pad="{scheme}">(x, w)',
            IMAGE,
            {"w": random(4, 5, 3, 4)},
        )
        for scheme in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case(
        "conv transpose 1-D grouped",
        "y = ConvTranspose<group=2, strides=[3], output_padding=[1]>(x, w)",
        SIGNAL,
        {"w": random(4, 2, 4)},
    ),
    Case(
        "conv transpose 3-D",
        "y = ConvTranspose<strides=[2,3,2], pads=[1,0,1,0,1,0]>(x, w, b)",
        VOLUME,
        {"w": random(4, 3, 3, 3, 2), "b": random(3)},
    ),
    Case(
        "conv transpose 3-D grouped",
        "y = ConvTranspose<group=2, strides=[1,2,2]>(x, w)",
        VOLUME,
        {"w": random(4, 3, 2, 2, 3)},
    ),
    # pooling
    Case("max pool", "y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", IMAGE),
    Case("max pool same", "y = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)", IMAGE),
    Case("max pool padded", "y = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", {"x": (4, 8, 8)}),
    Case(
        "max pool after relu",
        "r = Relu(x) y = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r)",
        {"x": (4, 8, 8)},
    ),
    Case("max pool ceil", "y = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)", IMAGE),
    Case("max pool 1-D", "y = MaxPool<kernel_shape=[3], strides=[2], pads=[1,1]>(x)", SIGNAL),
    Case("average pool", "y = AveragePool<kernel_shape=[2,3], strides=[2,2]>(x)", IMAGE),
    Case("average pool same", "y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)", IMAGE),
    Case(
        "average pool padded", "y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", {"x": (4, 8, 8)}
    ),
    Case("average pool counted", "y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)", IMAGE),
    Case("average pool ceil", "y = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)", IMAGE),
    Case("average pool 1-D", "y = AveragePool<kernel_shape=[3], strides=[2]>(x)", SIGNAL),
    Case("max pool dilated", "y = MaxPool<kernel_shape=[2,3], dilations=[2,2], pads=[1,1,1,1]>(x)", IMAGE),
    Case("max pool padded wide", "y = MaxPool<kernel_shape=[5,3], pads=[3,1,4,2], strides=[2,2]>(x)", IMAGE),
    Case(
        "max pool 3-D", "y = MaxPool<kernel_shape=[2,3,2], pads=[1,1,0,0,1,1], strides=[2,1,2], ceil_mode=1>(x)", VOLUME
    ),
    Case("max pool 3-D dilated", "y = MaxPool<kernel_shape=[2,2,2], dilations=[2,1,2], strides=[1,2,1]>(x)", VOLUME),
    *(
        Case(
            f"average pool dilated, counted {counted}",
            f"y = AveragePool<kernel_shape=[2,3], dilations=[2,2], pads=[1,1,1,2], count_include_pad={counted}, ceil_mode=1>(x)",
            IMAGE,
            opset=19,
        )
        for counted in (0, 1)
    ),
    *(
        Case(
            f"average pool 3-D, counted {counted}",
            f"y = AveragePool<kernel_shape=[2,3,2], pads=[1,1,0,1,1,1], strides=[2,1,2], count_include_pad={counted}>(x)",
            VOLUME,
        )
        for counted in (0, 1)
    ),
    Case("average pool same lower", 'y = AveragePool<kernel_shape=[2,4], auto_pad="SAME_LOWER">(x)', IMAGE),
    Case("global max pool 3-D", "y = GlobalMaxPool(x)", VOLUME),
    Case("global average pool", "y = GlobalAveragePool(x)", IMAGE),
    Case("global average pool 1-D", "y = GlobalAveragePool(x)", SIGNAL),
    Case("global max pool", "y = GlobalMaxPool(x)", IMAGE),
]
