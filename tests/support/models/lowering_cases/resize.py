"""Resize, Upsample, GridSample and Pad."""

from __future__ import annotations

import numpy as np

from tests.support.models.tflite_cases import FEATURES, IMAGE, ITEM_NUMBERS, NUMBERS, SIGNAL, Case, ints, random

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
    Case("pad reflect all", 'y = Pad<mode="reflect">(x, p)', FEATURES, {"p": ints(0, 5, 0, 4)}),
    *(
        Case(
            f"pad {mode}",
            f'c = Conv(x, w) y = Pad<mode="{mode}">(c, p)',
            IMAGE,
            {"w": random(4, 4, 1, 1), "p": pads},
            opset=19,
        )
        for mode, pads in [
            ("edge", ints(0, 0, 1, 2, 0, 1, 3, 0)),
            ("edge", ints(0, 0, 1, 1, 0, 0, 1, 0)),
            ("wrap", ints(0, 1, 2, 0, 0, 0, 9, 4)),
        ]
    ),
    Case("pad negative", "y = Pad(x, p, v)", IMAGE, {"p": ints(0, -1, 2, -3, 0, 1, -1, -2), "v": np.float32(-0.5)}),
    Case("pad negative reflect", 'y = Pad<mode="reflect">(x, p)', IMAGE, {"p": ints(0, 0, 2, -3, 0, 0, -1, 2)}),
    Case("pad axes", "y = Pad(x, p, , a)", IMAGE, {"p": ints(1, 2, 0, 3), "a": ints(-1, 1)}, opset=18),
    Case("pad 5-D", "y = Pad(x, p)", {"x": (2, 3, 4, 5)}, {"p": ints(0, 1, 0, 2, 0, 0, 0, 1, 0, 3)}),
    Case(
        "pad integers",
        "y = Pad(x, p, v)",
        {"x": (5,)},
        {"p": ints(0, 1, 0, 2), "v": np.int64(7)},
        types={"x": "int64"},
        outputs="int64 y",
    ),
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
    *(
        Case(
            f"resize by matrices {mode} {options}",
            f'c = Conv(x, w) y = Resize<mode="{mode}", {options}>(c, , s)',
            IMAGE,
            {"w": random(4, 4, 1, 1), "s": np.array([1, 1, *factors], np.float32)},
            opset=18,
        )
        for mode, options, factors in [
            ("cubic", 'coordinate_transformation_mode="half_pixel"', (2, 3)),
            ("cubic", 'coordinate_transformation_mode="align_corners", cubic_coeff_a=-0.5', (3, 2)),
            ("cubic", "exclude_outside=1", (2, 1)),
            ("linear", 'coordinate_transformation_mode="asymmetric"', (0.6, 1.7)),
            ("linear", 'coordinate_transformation_mode="half_pixel"', (2.3, 0.55)),
            ("linear", 'coordinate_transformation_mode="half_pixel_symmetric"', (1.3, 0.7)),
        ]
    ),
    Case(
        "resize shrinks",
        'y = Resize<mode="linear", antialias=1>(x, , s)',
        {"x": (4, 8, 12)},
        {"s": np.array([1, 1, 0.5, 0.25], np.float32)},
        opset=18,
    ),
    Case(
        "resize 1-D",
        'c = Conv(x, w) y = Resize<mode="linear">(c, , s)',
        SIGNAL,
        {"w": random(3, 4, 3), "s": np.array([1, 1, 2], np.float32)},
    ),
    Case(
        "resize nearest 1-D",
        "c = Conv(x, w) y = Resize(c, , s)",
        SIGNAL,
        {"w": random(3, 4, 3), "s": np.array([1, 1, 2], np.float32)},
    ),
    Case(
        "resize cubic 1-D",
        'c = Conv(x, w) y = Resize<mode="linear">(c, , s)',
        SIGNAL,
        {"w": random(3, 4, 3), "s": np.array([1, 1, 1.3], np.float32)},
    ),
    Case(
        "resize 3-D",
        'y = Resize<mode="linear">(x, , s)',
        {"x": (2, 3, 4, 5)},
        {"s": np.array([1, 1, 2, 1, 3], np.float32)},
    ),
    Case(
        "resize nearest 3-D",
        'y = Resize<mode="nearest">(x, , s)',
        {"x": (2, 3, 4, 5)},
        {"s": np.array([1, 1, 2, 1, 1.5], np.float32)},
    ),
    Case(
        "resize channels", 'y = Resize<mode="linear">(x, , s)', {"x": (5, 6)}, {"s": np.array([1, 2, 0.5], np.float32)}
    ),
    Case("resize by axes", 'y = Resize<mode="linear", axes=[3,2]>(x, , , t)', IMAGE, {"t": ints(13, 16)}, opset=18),
    *(
        Case(
            f"resize of TensorFlow {mode} x{factor}",
            f'y = Resize<mode="{mode}", coordinate_transformation_mode="tf_half_pixel_for_nn", nearest_mode="floor">(x, r, s)',
            IMAGE,
            {"r": np.zeros(0, np.float32), "s": np.array([1, 1, factor, factor], np.float32)},
            opset=11,
        )
        for mode, factor in [("nearest", 2), ("nearest", 0.6), ("linear", 1.7)]
    ),
    Case("upsample", "y = Upsample(x, s)", IMAGE, {"s": np.array([1, 1, 2, 2], np.float32)}, opset=9),
    # sampling at computed positions
    *(
        Case(
            f"grid sample {mode} {padding} {corners}",
            f'y = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={corners}>(x, g)',
            {"x": (4, 7, 9), "g": (5, 6, 2)},
            opset=16,
        )
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border")
        for corners in (0, 1)
    ),
    Case(
        "grid sample constant",
        f"{ITEM_NUMBERS} b = Unsqueeze(l, zero1) t = Concat<axis=0>(b, rest) e = Expand(g, t) y = GridSample(x, e)",
        {"x": (4, 1, 1)},
        {**NUMBERS, "zero1": ints(0), "rest": ints(5, 6, 2), "g": random(1, 5, 6, 2)},
        opset=16,
    ),
]
