"""Matrices, activations, arithmetic, reductions and movement: a graph or more for each operator."""

from __future__ import annotations

import numpy as np

from tests.support.models.tflite_cases import FEATURES, IMAGE, ITEM_NUMBERS, NUMBERS, SIGNAL, TOKENS, Case, ints, random

CASES = [
    # matrices
    Case("gemm", "y = Gemm<transB=1>(x, w, b)", FEATURES, {"w": random(5, 6), "b": random(5)}),
    Case("gemm alpha beta", "y = Gemm<alpha=0.5, beta=2.0>(x, w, b)", FEATURES, {"w": random(6, 5), "b": random(1, 5)}),
    Case("gemm relu", "g = Gemm(x, w) y = Relu(g)", FEATURES, {"w": random(6, 5)}),
    Case("gemm transposed", "t = Transpose<perm=[1,0]>(x) y = Gemm<transA=1>(t, w)", FEATURES, {"w": random(6, 5)}),
    Case("gemm computed addend", "y = Gemm(x, w, x)", FEATURES, {"w": random(6, 6)}),
    Case("matmul", "y = MatMul(x, w)", FEATURES, {"w": random(6, 5)}),
    Case("matmul tokens", "y = MatMul(x, w)", TOKENS, {"w": random(8, 3)}),
    Case("matmul add", "m = MatMul(x, w) y = Add(m, b)", TOKENS, {"w": random(8, 3), "b": random(3)}),
    Case("matmul constant left", "y = MatMul(w, x)", TOKENS, {"w": random(3, 5)}),
    Case("matmul batched constant", "y = MatMul(x, w)", {"x": (2, 5, 8)}, {"w": random(2, 8, 3)}),
    Case("matmul computed", "y = MatMul(x, t)", {"x": (5, 8), "t": (8, 4)}),
    Case("attention scores", "t = Transpose<perm=[0,1,3,2]>(x) y = MatMul(x, t)", {"x": (2, 5, 8)}),
    # Fourier transforms
    *(
        Case(f"dft {options} of {item}", f"y = DFT<{options}>({inputs})", {"x": item}, {"n": np.array(length)})
        for options, inputs, item, length in [
            ("axis=1", "x", (16, 1), 0),
            ("axis=1, onesided=1", "x, n", (16, 1), 20),
            ("axis=1", "x, n", (16, 1), 11),
            ("axis=2", "x", (3, 15, 2), 0),
            ("axis=-2, inverse=1", "x", (3, 16, 2), 0),
        ]
    ),
    # unary
    *(
        Case(op.lower(), f"y = {op}(x)", IMAGE)
        for op in ("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Floor", "Ceil", "Round", "Sin", "Cos", "Softplus")
    ),
    *(Case(op.lower(), f"y = {op}(x)", IMAGE, positive=True) for op in ("Sqrt", "Log", "Reciprocal")),
    Case("elu", "y = Elu(x)", IMAGE),
    Case("mish", "y = Mish(x)", IMAGE, opset=18),
    Case("softsign", "y = Softsign(x)", IMAGE),
    Case("hard swish", "y = HardSwish(x)", IMAGE),
    Case("hard sigmoid", "y = HardSigmoid<alpha=0.3, beta=0.4>(x)", IMAGE),
    Case("leaky relu", "y = LeakyRelu<alpha=0.2>(x)", IMAGE),
    Case("prelu", "c = Conv(x, w) y = PRelu(c, s)", IMAGE, {"w": random(4, 4, 1, 1), "s": random(4, 1, 1)}),
    Case("gelu", "y = Gelu(x)", TOKENS, opset=20),
    Case("gelu tanh", 'y = Gelu<approximate="tanh">(x)', TOKENS, opset=20),
    Case(
        "gelu spelled out",
        "d = Div(x, r) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
        TOKENS,
        {"r": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)},
    ),
    Case(
        "gelu half first",
        "d = Mul(x, r) e = Erf(d) a = Add(one, e) h = Mul(x, half) y = Mul(h, a)",
        TOKENS,
        {"r": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5)},
    ),
    Case(
        "gelu half in the middle",
        "d = Div(x, r) e = Erf(d) a = Add(e, one) m = Mul(a, half) y = Mul(x, m)",
        TOKENS,
        {"r": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)},
    ),
    Case("clip", "y = Clip(x, a, b)", IMAGE, {"a": np.float32(-0.5), "b": np.float32(0.7)}),
    Case("clip below", "y = Clip(x, a)", IMAGE, {"a": np.float32(-0.5)}),
    Case("clip above", "y = Clip(x, , b)", IMAGE, {"b": np.float32(6)}),
    Case("clip attributes", "y = Clip<min=0.0, max=6.0>(x)", IMAGE, opset=10),
    Case("identity", "a = Identity(x) y = Relu(a)", IMAGE),
    Case("identity of an input", "y = Identity(x)", IMAGE),
    Case("dropout", "a = Dropout(x) y = Relu(a)", IMAGE),
    Case("cast", "i = Cast<to=6>(x) f = Cast<to=1>(i) y = Add(f, x)", IMAGE),
    # several operands
    Case("add", "y = Add(x, z)", {"x": (4, 7, 9), "z": (4, 7, 9)}),
    Case("sub broadcast", "y = Sub(x, z)", {"x": (4, 7, 9), "z": (4, 1, 1)}),
    Case("mul scalar", "y = Mul(x, c)", IMAGE, {"c": np.float32(0.3)}),
    Case("mul per channel", "c = Conv(x, w) y = Mul(c, s)", IMAGE, {"w": random(6, 4, 3, 3), "s": random(6, 1, 1)}),
    Case("add over the last axis", "c = Conv(x, w) y = Add(c, s)", IMAGE, {"w": random(6, 4, 1, 1), "s": random(9)}),
    Case("add 1-D", "c = Conv(x, w) y = Add(c, s)", SIGNAL, {"w": random(6, 4, 1), "s": random(1, 6, 11)}),
    Case("div constant", "y = Div(x, c)", IMAGE, {"c": np.abs(random(4, 1, 1)) + 1}),
    Case("div computed", "e = Exp(x) y = Div(x, e)", IMAGE),
    Case("div of a constant", "e = Exp(x) y = Div(c, e)", IMAGE, {"c": np.float32(2)}),
    *(Case(f"pow {p}", "y = Pow(x, p)", IMAGE, {"p": np.float32(p)}, positive=True) for p in (0.5, 1, 2, 3, 1.7)),
    Case("pow computed", "y = Pow(x, z)", {"x": (4, 7), "z": (4, 7)}, positive=True),
    Case("max min", "m = Max(x, z) y = Min(m, c)", {"x": (4, 7), "z": (4, 7)}, {"c": np.float32(0.2)}),
    Case("max of three", "y = Max(x, z, t)", {"x": (4, 7), "z": (4, 7), "t": (4, 7)}),
    Case("sum of three", "y = Sum(x, z, t)", {"x": (4, 7), "z": (4, 7), "t": (4, 7)}),
    Case("where", "g = Greater(x, z) y = Where(g, x, z)", {"x": (4, 7), "z": (4, 7)}),
    Case(
        "comparisons",
        "a = Less(x, z) b = LessOrEqual(x, z) c = GreaterOrEqual(x, z) d = Equal(x, z) e = And(a, b) f = Or(c, d)"
        "g = Not(e) h = Or(f, g) y = Where(h, x, z)",
        {"x": (4, 7), "z": (4, 7)},
    ),
    Case(
        "squeeze and excite",
        "c = Conv(x, w) g = GlobalAveragePool(c) s = Sigmoid(g) y = Mul(c, s)",
        IMAGE,
        {"w": random(6, 4, 3, 3)},
    ),
    # reductions
    *(
        Case(
            f"{op} {axes} keep {keep}",
            f"c = Conv(x, w) y = {op}<axes={axes}, keepdims={keep}>(c)",
            IMAGE,
            {"w": random(5, 4, 1, 1)},
        )
        for op, axes, keep in [
            ("ReduceMean", "[2,3]", 0),
            ("ReduceMean", "[2,3]", 1),
            ("ReduceMean", "[1]", 0),
            ("ReduceMean", "[-1]", 1),
            ("ReduceMax", "[2,3]", 0),
            ("ReduceMin", "[1,3]", 1),
            ("ReduceProd", "[3]", 0),
        ]
    ),
    Case("reduce sum", "y = ReduceSum<keepdims=0>(x, a)", TOKENS, {"a": ints(1)}),
    Case(
        "reduce sum 1-D", "c = Conv(x, w) y = ReduceSum<keepdims=0>(c, a)", SIGNAL, {"w": random(5, 4, 3), "a": ints(2)}
    ),
    Case("reduce l2", "n = ReduceL2<axes=[-1]>(x) y = Div(x, n)", TOKENS),
    Case("reduce mean opset 18", "y = ReduceMean(x, a)", TOKENS, {"a": ints(-1)}, opset=18),
    Case("arg max", "y = ArgMax<axis=1, keepdims=0>(x)", FEATURES, outputs="int64 y"),
    Case("arg min kept", "y = ArgMin<axis=-1>(x)", TOKENS, outputs="int64 y"),
    # movement
    Case("reshape", "y = Reshape(x, s)", TOKENS, {"s": ints(0, 2, 20)}),
    Case(
        "reshape merges the batch",
        "r = Reshape(x, s) m = MatMul(r, w) y = Reshape(m, t)",
        TOKENS,
        {"s": ints(-1, 8), "w": random(8, 3), "t": ints(-1, 5, 3)},
    ),
    Case(
        "reshape of channels last",
        "c = Conv(x, w) y = Reshape(c, s)",
        IMAGE,
        {"w": random(6, 4, 1, 1), "s": ints(0, 3, -1)},
    ),
    Case("flatten", "y = Flatten(x)", IMAGE),
    Case(
        "flatten gemm",
        "c = Conv(x, w) f = Flatten(c) y = Gemm<transB=1>(f, v)",
        IMAGE,
        {"w": random(3, 4, 3, 3), "v": random(5, 105)},
    ),
    Case(
        "flatten matmul",
        "c = Conv(x, w) f = Flatten(c) y = MatMul(f, v)",
        IMAGE,
        {"w": random(3, 4, 3, 3), "v": random(105, 5)},
    ),
    Case(
        "flatten gemm 1-D",
        "c = Conv(x, w) f = Flatten(c) y = Gemm<transB=1>(f, v)",
        SIGNAL,
        {"w": random(3, 4, 3), "v": random(5, 27)},
    ),
    Case(
        "flatten batched matmul",
        "c = Conv(x, w) f = Flatten(c) y = MatMul(f, v)",
        IMAGE,
        {"w": random(3, 4, 3, 3), "v": random(2, 105, 5)},
    ),
    Case(
        "pool flatten gemm",
        "c = Conv(x, w) p = GlobalAveragePool(c) f = Flatten(p) y = Gemm(f, v)",
        IMAGE,
        {"w": random(6, 4, 3, 3), "v": random(6, 5)},
    ),
    Case("squeeze", "p = GlobalAveragePool(x) y = Squeeze(p, a)", IMAGE, {"a": ints(2, 3)}),
    Case("squeeze attributes", "p = GlobalAveragePool(x) y = Squeeze<axes=[2,3]>(p)", IMAGE, opset=11),
    Case("unsqueeze", "y = Unsqueeze(x, a)", TOKENS, {"a": ints(1)}),
    Case("transpose", "y = Transpose<perm=[0,2,1]>(x)", TOKENS),
    Case(
        "image to tokens and back",
        "c = Conv(x, w) r = Reshape(c, places) t = Transpose<perm=[0,2,1]>(r) m = MatMul(t, k)"
        "u = Transpose<perm=[0,2,1]>(m) i = Reshape(u, image) y = Conv(i, v)",
        IMAGE,
        {
            "w": random(8, 4, 3, 3),
            "places": ints(0, 8, 35),
            "k": random(8, 8),
            "image": ints(0, 8, 5, 7),
            "v": random(4, 8, 3, 3),
        },
    ),
    Case(
        "tokens to signal and back",
        "m = MatMul(x, k) u = Transpose<perm=[0,2,1]>(m) c = Conv(u, v) t = Transpose<perm=[0,2,1]>(c) y = MatMul(t, k)",
        TOKENS,
        {"k": random(8, 8), "v": random(8, 8, 3)},
    ),
    Case(
        "image to tokens and channels",
        "c = Conv(x, w) r = Reshape(c, places) t = Transpose<perm=[0,2,1]>(r) y = MatMul(r, t)",
        IMAGE,
        {"w": random(8, 4, 3, 3), "places": ints(0, 8, 35)},
    ),
    Case(
        "signal to image",
        "c = Conv(x, v) u = Unsqueeze(c, a) d = Conv(u, w) y = Squeeze(d, a)",
        SIGNAL,
        {"v": random(8, 4, 3), "a": ints(2), "w": random(4, 8, 1, 3)},
    ),
    Case(
        "windows of a small image",
        "a = Reshape(x, s) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, t) d = Transpose<perm=[0,3,2,1]>(c)"
        "e = Reshape(d, u) f = MatMul(e, w) g = Reshape(f, t) h = Transpose<perm=[0,3,2,1]>(g) i = Reshape(h, v)"
        "j = Transpose<perm=[0,2,1,3]>(i) y = Reshape(j, z)",
        {"x": (4, 2, 2)},
        {
            "s": ints(-1, 2, 1, 2),
            "t": ints(-1, 4, 1, 4),
            "u": ints(-1, 1, 4),
            "w": random(4, 4),
            "v": ints(-1, 1, 2, 2),
            "z": ints(-1, 4, 2, 2),
        },
    ),
    Case("transpose to NHWC", "c = Conv(x, w) y = Transpose<perm=[0,2,3,1]>(c)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case(
        "transpose from NHWC",
        "t = Transpose<perm=[0,3,1,2]>(x) y = Conv(t, w)",
        {"x": (7, 9, 4)},
        {"w": random(6, 4, 3, 3)},
    ),
    Case("concat", "y = Concat<axis=1>(x, z)", {"x": (4, 7, 9), "z": (2, 7, 9)}),
    Case(
        "concat empty",
        "s = Shape<start=0, end=1>(x) t = Concat<axis=0>(s, r) e = ConstantOfShape(t) f = Neg(e) z = Relu(x) "
        "y = Concat<axis=1>(z, f)",
        {"x": (4, 7)},
        {"r": ints(0, 7)},
    ),
    Case(
        "concat channels",
        "a = Conv(x, w) b = Conv(x, v) y = Concat<axis=1>(a, b)",
        IMAGE,
        {"w": random(3, 4, 1, 1), "v": random(2, 4, 1, 1)},
    ),
    Case("concat rows 1-D", "a = Conv(x, w) y = Concat<axis=-1>(a, x)", SIGNAL, {"w": random(4, 4, 1)}),
    Case("split", "a, b = Split<axis=1>(x, s) y = Sub(b, a)", {"x": (4, 5)}, {"s": ints(2, 2)}),
    Case(
        "split uneven",
        "c = Conv(x, w) a, b = Split<axis=1>(c, s) d = ReduceMean<axes=[1]>(a) y = Sub(b, d)",
        IMAGE,
        {"w": random(5, 4, 1, 1), "s": ints(2, 3)},
    ),
    Case("slice", "y = Slice(x, s, e, a)", IMAGE, {"s": ints(1, -5), "e": ints(3, 2**63 - 1), "a": ints(1, 3)}),
    Case(
        "slice steps",
        "y = Slice(x, s, e, a, t)",
        IMAGE,
        {"s": ints(0, 1), "e": ints(7, 9), "a": ints(2, 3), "t": ints(2, 3)},
    ),
    Case(
        "slice backwards",
        "y = Slice(x, s, e, a, t)",
        IMAGE,
        {"s": ints(-1), "e": ints(-(2**31)), "a": ints(3), "t": ints(-2)},
    ),
    Case(
        "slice channels last",
        "c = Conv(x, w) y = Slice(c, s, e, a, t)",
        IMAGE,
        {"w": random(6, 4, 1, 1), "s": ints(1), "e": ints(6), "a": ints(1), "t": ints(2)},
    ),
    Case("slice attributes", "y = Slice<axes=[1], starts=[1], ends=[3]>(x)", IMAGE, opset=9),
    Case("gather class token", "y = Gather<axis=1>(x, i)", TOKENS, {"i": np.int64(0)}),
    Case("gather from the end", "y = Gather<axis=2>(x, i)", TOKENS, {"i": ints(-1, 2)}),
    Case("embedding", "y = Gather(w, x)", {"x": (5,)}, {"w": random(7, 4)}, types={"x": "int64"}),
    # Exporters write a mask's lookup, and the position ids of RoBERTa, with the numbers of the batch's items.
    Case(
        "gather nd of each item's places",
        f"{ITEM_NUMBERS} r = Unsqueeze(n, last) i = Mul(r, zero) p = Add(i, places) q = Unsqueeze(p, two) "
        "a = Add(r, nothing) b = Unsqueeze(a, two) c = Concat<axis=2>(b, q) y = GatherND(x, c)",
        TOKENS,
        NUMBERS | {"places": ints(4, 0, -2), "nothing": ints(0, 0, 0)},
    ),
    Case(
        "gather each item's places from all items",
        f"{ITEM_NUMBERS} f = Reshape(x, rows) r = Unsqueeze(n, last) m = Mul(r, five) i = Add(m, places) y = Gather(f, i)",
        TOKENS,
        NUMBERS | {"places": ints(4, 0, 2), "rows": ints(-1, 8), "five": ints(5)},
    ),
    Case(
        "gather elements of a row for each item",
        "s = Shape<start=0, end=1>(x) e = Concat<axis=0>(s, seven) w = Expand(row, e) y = GatherElements<axis=1>(w, x)",
        {"x": (5,)},
        {"row": random(1, 7), "seven": ints(7)},
        types={"x": "int64"},
    ),
    Case("expand", "y = Expand(x, s)", {"x": (4, 1)}, {"s": ints(1, 4, 3)}),
    Case(
        "class token",
        "s = Shape<start=0, end=1>(x) t = Concat<axis=0>(s, o) e = Expand(c, t) y = Concat<axis=1>(e, x)",
        TOKENS,
        {"o": ints(1, 8), "c": random(1, 1, 8)},
    ),
    Case("space to depth", "y = SpaceToDepth<blocksize=2>(x)", {"x": (3, 4, 6)}),
    Case("depth to space", "y = DepthToSpace<blocksize=2>(x)", {"x": (8, 3, 2)}),
    Case("pixel shuffle", 'y = DepthToSpace<blocksize=2, mode="CRD">(x)', {"x": (8, 3, 2)}),
]
