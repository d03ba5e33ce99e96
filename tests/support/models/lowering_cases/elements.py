"""Elements, indices, order and reductions: cases that ONNX's node tests omit."""

from __future__ import annotations

import numpy as np

from tests.support.models.tflite_cases import FEATURES, IMAGE, TOKENS, Case, ints, random

INDICES = {"i": "int64"}

CASES = [
    # one input
    Case("erf", "y = Erf(x)", IMAGE),
    Case("sign", "y = Sign(x)", IMAGE),
    Case("sign of integers", "s = Sign(i) y = Cast<to=1>(s)", {"i": (4,)}, types=INDICES),
    Case("abs of integers", "n = Neg(i) a = Abs(n) y = Cast<to=1>(a)", {"i": (4,)}, types=INDICES),
    Case("is nan", "l = Log(x) n = IsNaN(l) y = Where(n, x, l)", IMAGE),
    Case("is inf", "f = IsInf<detect_negative=0>(x) y = Where(f, z, x)", IMAGE, {"z": np.float32(0)}, opset=20),
    # activations
    Case("elu alpha", "y = Elu<alpha=0.5>(x)", IMAGE),
    Case("selu", "y = Selu(x)", IMAGE),
    Case("celu", "y = Celu<alpha=2.0>(x)", IMAGE),
    Case("swish", "y = Swish<alpha=1.5>(x)", IMAGE, opset=24),
    Case(
        "constants",
        "s = Shape(x) n = ReduceMax<keepdims=0>(s) r = Range(o, n, i) c = Cast<to=1>(r) a = Add(x, c) y = Relu(a)",
        {"x": (5, 1)},
        {"o": np.int64(0), "i": np.int64(1)},
        opset=18,
    ),
    Case("mish spelled out", "s = Softplus(x) t = Tanh(s) y = Mul(x, t)", IMAGE),
    Case("thresholded relu", "y = ThresholdedRelu<alpha=0.7>(x)", IMAGE),
    Case("prelu computed", "y = PRelu(x, z)", {"x": (4, 7), "z": (4, 7)}),
    Case(
        "relu of integers",
        "n = Cast<to=6>(i) s = Sub(n, c) r = Relu(s) y = Cast<to=1>(r)",
        {"i": (4,)},
        {"c": np.int32(3)},
        types=INDICES,
    ),
    Case("clip computed", "l = ReduceMin<keepdims=0>(z) y = Clip(x, l)", {"x": (4, 7), "z": (4, 7)}),
    Case("clip without bounds", "c = Clip(x) y = Relu(c)", IMAGE),
    Case("softmax of rank 5", "y = Softmax<axis=2>(x)", {"x": (2, 3, 4, 2)}),
    # several operands
    Case("mean of three", "y = Mean(x, z, c)", {"x": (4, 7), "z": (4, 7)}, {"c": random(4, 1)}),
    Case("max of three that broadcast", "y = Max(x, z, c)", {"x": (4, 1), "z": (1, 7)}, {"c": random(4, 7)}),
    Case(
        "sum channels last", "c = Conv(x, w) y = Sum(c, x, b)", IMAGE, {"w": random(4, 4, 1, 1), "b": random(4, 1, 1)}
    ),
    Case("mod", "y = Mod<fmod=1>(x, c)", IMAGE, {"c": np.float32(0.7)}),
    Case("mod of integers", "m = Mod(i, c) y = Cast<to=1>(m)", {"i": (4,)}, {"c": ints(-3)}, types=INDICES),
    Case("div of integers", "n = Neg(i) d = Div(n, c) y = Cast<to=1>(d)", {"i": (4,)}, {"c": ints(3)}, types=INDICES),
    Case(
        "xor",
        "a = Greater(x, z) b = Less(x, c) e = Xor(a, b) y = Where(e, x, z)",
        {"x": (4,), "z": (4,)},
        {"c": random(4)},
    ),
    Case("rank 6", "y = Add(x, c)", {"x": (2, 1, 3, 1, 2)}, {"c": random(2, 3, 1, 4, 2)}),
    Case("above zero", "g = Greater(x, o) y = Where(g, x, z)", {"x": (4,), "z": (4,)}, {"o": np.float32(0)}),
    # matrices
    Case("matmul by a vector", "y = MatMul(x, v)", TOKENS, {"v": random(8)}),
    Case("matmul of a vector", "y = MatMul(v, x)", TOKENS, {"v": random(5)}),
    Case("matmul of other ranks", "y = MatMul(x, w)", {"x": (2, 5, 8)}, {"w": random(1, 8, 3)}),
    Case(
        "gemm of computed matrices",
        "t = Transpose(x) y = Gemm<alpha=0.5, beta=0.3, transA=1>(t, w, x)",
        FEATURES,
        {"w": random(6, 6)},
    ),
    # reductions and order
    *(Case(f"{op} of two axes", f"y = {op}<axes=[1,-1]>(x)", IMAGE) for op in ("ReduceL1", "ReduceSumSquare")),
    Case("reduce log sum", "y = ReduceLogSum<axes=[1], keepdims=0>(x)", IMAGE, positive=True),
    Case("reduce log sum exp", "y = ReduceLogSumExp<axes=[2], keepdims=0>(x)", IMAGE),
    Case(
        "reduce log sum exp channels last",
        "c = Conv(x, w) y = ReduceLogSumExp<axes=[1]>(c)",
        IMAGE,
        {"w": random(6, 4, 1, 1)},
    ),
    Case("reduce nothing", "y = ReduceSum<noop_with_empty_axes=1>(x, a)", TOKENS, {"a": ints()}),
    Case("cumulative sum", "y = CumSum<exclusive=1, reverse=1>(x, a)", TOKENS, {"a": np.int64(-1)}),
    Case("last arg max", "y = ArgMax<axis=1, select_last_index=1>(x)", TOKENS, outputs="int64 y"),
    Case("top k", "v, i = TopK(x, k) f = Cast<to=1>(i) y = Add(v, f)", TOKENS, {"k": ints(3)}),
    Case("top k smallest", "y, i = TopK<largest=0, axis=1>(x, k)", TOKENS, {"k": ints(2)}),
    *(
        Case(
            f"reverse sequence {dtype}",
            f"f = Flatten(i) o = Mod(f, c) n = Squeeze(o, a) s = Cast<to={to}>(x) "
            f"r = ReverseSequence<batch_axis=0, time_axis=1>(s, n) y = Cast<to=1>(r)",
            {"x": (5, 8), "i": (1,)},
            {"c": ints(6), "a": ints(1)},
            types=INDICES,
        )
        for dtype, to in (("float32", 1), ("int8", 3), ("int32", 6))
    ),
    # indices
    Case("gather by a computed index", "y = Gather<axis=1>(x, i)", {"x": (7, 3), "i": (2,)}, types=INDICES),
    Case("gather from the end", "n = Neg(i) y = Gather(w, n)", {"i": (5,)}, {"w": random(7, 4)}, types=INDICES),
    Case("gather nd", "y = GatherND(w, i)", {"i": (5, 2)}, {"w": random(7, 7, 4)}, types=INDICES),
    Case("one hot", "y = OneHot<axis=1>(i, d, v)", {"i": (5,)}, {"d": ints(7), "v": random(2)}, types=INDICES),
    Case("trilu", "y = Trilu<upper=0>(x, k)", {"x": (5, 5)}, {"k": ints(1).reshape(())}),
    # movement
    Case("tile", "y = Tile(x, r)", TOKENS, {"r": ints(1, 2, 3)}),
    Case("expand integers", "e = Expand(i, s) y = Cast<to=1>(e)", {"i": (4, 1)}, {"s": ints(1, 4, 3)}, types=INDICES),
    Case("split in three", "a, b, y = Split<axis=1, num_outputs=3>(x)", TOKENS, opset=18),
]
