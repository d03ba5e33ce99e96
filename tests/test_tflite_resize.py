"""Resize and Pad in the TFLite lowering."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

import numpy as np

from tests.tflite_cases import FEATURES, IMAGE, Case, assert_agrees_with_onnx_runtime, ints, random

CASES = [
    # padding
    Case("pad", "y = Pad(x, p)", IMAGE, {"p": ints(0, 0, 1, 2, 0, 0, 3, 0)}),
    Case(
        "pad value",
        "c = Conv(x, w) y = Pad(c, p, v)",
        IMAGE,
        {"w": random(4, 4, 1, 1), "p": ints(0, 0, 1, 2, 0, 0, 3, 0), "v": np.float32(0.5)},
    ),
    Case("pad reflect", 'y = Pad<mode="reflect">(x, p)', IMAGE, {"p": ints(0, 0, 1, 2, 0, 0, 3, 0)}),
    Case("pad attributes", "y = Pad<pads=[0,1,0,2]>(x)", FEATURES, opset=10),
    # resizing
    *(
        Case(
            f"resize {mode} {rule} {rounding} x{factor}",
            f'y = Resize<mode="{mode}", coordinate_transformation_mode="{rule}", nearest_mode="{rounding}">(x, , s)',
            IMAGE,
            {"s": np.array([1, 1, factor, factor], np.float32)},
        )
        for mode, rule, rounding, factor in [
            ("nearest", "asymmetric", "floor", 2),
            ("nearest", "half_pixel", "round_prefer_floor", 2),
            ("nearest", "half_pixel", "round_prefer_ceil", 3),
            ("nearest", "align_corners", "round_prefer_floor", 2),
            ("nearest", "asymmetric", "ceil", 1.5),
            ("linear", "half_pixel", "floor", 2),
            ("linear", "pytorch_half_pixel", "floor", 3),
            ("linear", "align_corners", "floor", 2),
            ("linear", "asymmetric", "floor", 2),
        ]
    ),
    Case(
        "resize to size",
        'n = Shape<start=0, end=2>(x) t = Concat<axis=0>(n, s) y = Resize<mode="linear">(x, , , t)',
        IMAGE,
        {"s": ints(14, 18)},
    ),
    Case("upsample", "y = Upsample(x, s)", IMAGE, {"s": np.array([1, 1, 2, 2], np.float32)}, opset=9),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resize_agrees_with_onnx_runtime(case: Case) -> None:
    assert_agrees_with_onnx_runtime(case)
