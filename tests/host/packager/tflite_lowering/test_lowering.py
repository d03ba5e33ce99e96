"""The TFLite lowering: each operator has a row in some `CASES` and must agree with ONNX Runtime at batch 1 and 3."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from edgert.errors import BuildFailed, OperatorUnsupported

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from edgert_deploy.packager.tflite_lowering import OPS, lower
from edgert_deploy.packager.tflite_lowering.fusion import RSQRT, fuse
from edgert_deploy.packager.tflite_lowering.graph import read_graph
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.host.packager.tflite_lowering import (
    test_convolution,
    test_einsum,
    test_normalization,
    test_operators,
    test_recurrent,
    test_resize,
)
from tests.support.tflite_cases import (
    ABSOLUTE_TOLERANCE,
    FEATURES,
    IMAGE,
    RELATIVE_TOLERANCE,
    SIGNAL,
    TOKENS,
    Arrays,
    Case,
    assert_agrees_with_onnx_runtime,
    inputs_of,
    ints,
    model_of,
    operators_of,
    quantized,
    random,
    run_onnx,
    run_tflite,
    sqnr_db,
)

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
    Case("transpose to NHWC", "c = Conv(x, w) y = Transpose<perm=[0,2,3,1]>(c)", IMAGE, {"w": random(6, 4, 3, 3)}),
    Case(
        "transpose from NHWC",
        "t = Transpose<perm=[0,3,1,2]>(x) y = Conv(t, w)",
        {"x": (7, 9, 4)},
        {"w": random(6, 4, 3, 3)},
    ),
    Case("concat", "y = Concat<axis=1>(x, z)", {"x": (4, 7, 9), "z": (2, 7, 9)}),
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


ALL_CASES = [
    *CASES,
    *test_convolution.CASES,
    *test_einsum.CASES,
    *test_normalization.CASES,
    *test_recurrent.CASES,
    *test_operators.CASES,
    *test_resize.CASES,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowered_operator_agrees_with_onnx_runtime(case: Case) -> None:
    assert_agrees_with_onnx_runtime(case)


def test_every_lowering_has_a_case() -> None:
    assert set(OPS) - {RSQRT} - test_operators.FIXED_BATCH <= operators_of(ALL_CASES)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("gelu spelled out", ["Gelu"]),
        ("gelu half first", ["Gelu"]),
        ("gelu half in the middle", ["Gelu"]),
        ("hard swish", ["HardSwish"]),
        ("batch normalization folded", ["Conv"]),
        ("conv relu6", ["Conv"]),
        ("gemm relu", ["Gemm"]),
        ("conv relu shared", ["Conv", "Relu", "Add"]),
    ],
)
def test_groups_of_nodes_become_one(name: str, fused: list[str]) -> None:
    case = next(case for case in ALL_CASES if case.name == name)
    assert [node.op_type for node in fuse(read_graph(model_of(case), OPS), OPS).nodes] == fused


def test_flattening_for_constant_weights_costs_no_transposition() -> None:
    case = next(case for case in ALL_CASES if case.name == "flatten gemm")
    interpreter = Interpreter(model_content=lower(model_of(case)))
    names = [detail["name"] for detail in interpreter.get_tensor_details()]
    assert not [name for name in names if name.endswith("_native")]


def test_names_and_order_of_inputs_and_outputs_are_kept() -> None:
    body = "late = Relu(b) early = Add(a, b) b2 = Identity(early)"
    case = Case("names", body, {"b": (4, 6, 6), "a": (4, 6, 6)}, outputs="float early, float late, float b2")
    content = lower(model_of(case))
    interpreter = Interpreter(model_content=content)
    assert [d["name"] for d in interpreter.get_input_details()] == ["b", "a"]
    assert [d["name"] for d in interpreter.get_output_details()] == ["early", "late", "b2"]
    signature = interpreter.get_signature_list()["serving_default"]
    assert signature == {"inputs": ["a", "b"], "outputs": ["b2", "early", "late"]}
    inputs = inputs_of(case, 3)
    for got, wanted in zip(run_tflite(content, inputs), run_onnx(model_of(case), inputs), strict=True):
        np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE)


def test_a_fixed_batch_stays_fixed() -> None:
    case = Case("fixed", "y = Conv(x, w)", IMAGE, {"w": random(6, 4, 3, 3)})
    content = lower(model_of(case, batch="4"))
    (detail,) = Interpreter(model_content=content).get_input_details()
    assert list(detail["shape_signature"]) == [4, 4, 7, 9]
    inputs = inputs_of(case, 4)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)


def test_weights_are_aligned_in_the_file() -> None:
    case = next(case for case in ALL_CASES if case.name == "conv 3x3 padded")
    content = lower(model_of(case))
    kernel = np.ascontiguousarray(np.asarray(case.constants["w"]).transpose(0, 2, 3, 1)).tobytes()
    assert content.index(kernel) % 16 == 0


def test_lowering_twice_gives_the_same_bytes() -> None:
    for case in CASES[:5]:
        assert lower(model_of(case)) == lower(model_of(case))


def test_everything_that_is_not_covered_is_listed_at_once() -> None:
    body = (
        "[first] d = Atanh(x) [second] c = Tan(d) [third] r = Relu(c) [fourth] h = Hardmax(r)"
        "[fifth] y = ScatterElements(h, i, h)"
    )
    constants = {"i": np.zeros((1, 4, 7, 9), np.int64)}
    with pytest.raises(OperatorUnsupported) as raised:
        lower(model_of(Case("many", body, IMAGE, constants)))
    for part in (
        "Atanh (node 'first')",
        "Tan (node 'second')",
        "Hardmax (node 'fourth')",
        "ScatterElements (node 'fifth')",
    ):
        assert part in raised.value.message
    assert "third" not in raised.value.message


@pytest.mark.parametrize(
    ("body", "items", "constants", "reason"),
    [
        ('y = ScatterND<reduction="max">(x, i, u)', FEATURES, {"i": ints(0, 0).reshape(1, 2), "u": random(1)}, "'max'"),
        ("y = Conv(x, z)", {"x": (4, 7, 9), "z": (4, 3, 3)}, {}, "the kernel is not a constant"),
        ("y = Conv(x, w)", {"x": (2, 5, 5, 5, 5)}, {"w": random(3, 2, 3, 3, 3, 3)}, "4 spatial axes"),
        ("y, i = MaxPool<kernel_shape=[2,2]>(x)", IMAGE, {}, "indices"),
        ("y = LRN<size=3>(x)", {"x": (2, 3, 4, 5)}, {}, "3 spatial axes"),
        ("y = Pad(x, p)", IMAGE, {"p": ints(1, 0, 0, 0, 0, 0, 0, 0)}, "padding the batch"),
        ("y = Concat<axis=0>(x, x)", IMAGE, {}, "along the batch"),
        ("c = Cast<to=11>(x) s = Sin(c) y = Cast<to=1>(s)", IMAGE, {}, "float64"),
        ("n = NonZero(x) c = Cast<to=1>(n) y = Relu(c)", IMAGE, {}, "NonZero"),
    ],
)
def test_what_is_not_covered_says_why(
    body: str, items: Mapping[str, tuple[int, ...]], constants: Arrays, reason: str
) -> None:
    with pytest.raises(OperatorUnsupported, match=reason):
        lower(model_of(Case("uncovered", body, items, constants)))


def test_what_onnx_runtime_cannot_fold_is_folded_all_the_same() -> None:
    # ONNX Runtime has no Relu of int64, and so opens no such model; the shape is worked out without it.
    body = "r = Relu(i) s = Shape<start=1>(i) z = Sub(s, s) t = Concat<axis=0>(z, s) y = Reshape(r, t)"
    case = Case("int64", body, {"i": (4,)}, types={"i": "int64"}, outputs="int64 y")
    inputs = {"i": np.array([[1, -2, 3, -4]])}
    np.testing.assert_array_equal(run_tflite(lower(model_of(case)), inputs)[0], [[1, 0, 3, 0]])


def test_a_constant_out_of_all_proportion_is_not_worked_out() -> None:
    body = "h = Expand(c, s) r = Relu(i) m = Max(h, r) y = ReduceMax(m)"
    constants = {"s": ints(1, 10**12), "c": ints(1)}
    case = Case("huge", body, {"i": (1,)}, constants, types={"i": "int64"}, outputs="int64 y")
    with pytest.raises((BuildFailed, OperatorUnsupported)):
        lower(model_of(case))


def test_an_operator_outside_of_onnx_is_named() -> None:
    model = model_of(Case("foreign", "[alien] y = Relu(x)", IMAGE))
    model.graph.node[0].domain = "com.example"
    model.graph.node[0].op_type = "Alien"
    with pytest.raises(OperatorUnsupported, match=r"com\.example:Alien \(node 'alien'\)"):
        lower(model)


# --- INT8

# Below the 40 dB that 8 bits give one operator: three layers, each rounding its weights and its result.
SQNR_DB_MIN = 28
SMALL_CNN = Case(
    "small CNN",
    "c = Conv<pads=[1,1,1,1]>(x, w1, b1) n = BatchNormalization(c, s, b, m, v) r = Relu(n)"
    "p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) c2 = Conv(p, w2) r2 = Relu(c2) f = Flatten(r2)"
    "y = Gemm<transB=1>(f, w3, b3)",
    {"x": (1, 8, 8)},
    {
        "w1": random(8, 1, 3, 3),
        "b1": random(8),
        "s": np.abs(random(8, seed=1)),
        "b": random(8, seed=2),
        "m": random(8, seed=3),
        "v": np.abs(random(8, seed=4)) + 1,
        "w2": random(16, 8, 3, 3),
        "w3": random(10, 64),
        "b3": random(10),
    },
)


def test_int8_of_a_small_cnn_stays_close_and_small() -> None:
    content = quantized(SMALL_CNN)
    inputs = inputs_of(SMALL_CNN, 64, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(SMALL_CNN), inputs), run_tflite(content, inputs)
    assert got.dtype == np.float32
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_int8_is_deterministic() -> None:
    assert quantized(SMALL_CNN, 20) == quantized(SMALL_CNN, 20)


def test_int8_keeps_names_and_the_open_batch() -> None:
    interpreter = Interpreter(model_content=quantized(SMALL_CNN, 20))
    (source,), (answer,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert (source["name"], list(source["shape_signature"])) == ("x", [-1, 1, 8, 8])
    assert (answer["name"], list(answer["shape_signature"])) == ("y", [-1, 10])


def test_int8_leaves_token_ids_alone() -> None:
    body = "e = Gather(t, x) n = MatMul(e, w) y = ReduceMean<axes=[1], keepdims=0>(n)"
    constants = {"t": random(7, 16), "w": random(16, 6)}
    case = Case("tokens", body, {"x": (5,)}, constants, types={"x": "int64"})
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case), inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_int8_of_a_branch_that_is_always_zero_runs() -> None:
    body = "r = Relu(x) n = Neg(r) z = Add(r, n) c = Conv(x, w, low) d = Relu(c) e = Conv(d, w, b) f = Add(e, z) y = Add(f, x)"
    case = Case("dead", body, IMAGE, {"w": random(4, 4, 1, 1), "low": np.full(4, -100, np.float32), "b": random(4)})
    inputs = inputs_of(case, 4, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 20), inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


@pytest.mark.parametrize(
    ("mask", "masked"),
    [
        ("f = Cast<to=1>(m) b = Mul(f, low)", np.finfo(np.float32).min),
        ("f = Cast<to=1>(m) b = Mul(f, low)", -1e9),
        ("n = Cast<to=9>(m) b = Where(n, low, zero)", np.finfo(np.float32).min),
        ("n = Cast<to=9>(m) b = Where(n, low, zero)", -np.inf),
        ("f = Cast<to=1>(m) c = Mul(f, zero) b = Add(c, causal)", -np.inf),
    ],
)
def test_a_mask_of_scores_survives(mask: str, masked: float) -> None:
    body = (
        "q = MatMul(x, w) k = Transpose<perm=[0,2,1]>(x) s = MatMul(q, k)"
        f"{mask} t = Add(s, b) p = Softmax(t) y = MatMul(p, x)"
    )
    causal = np.triu(np.full((1, 5, 5), masked, np.float32), 1)
    constants = {"w": random(8, 8) / 4, "low": np.float32(masked), "zero": np.float32(0), "causal": causal}
    case = Case("mask", body, {"x": (5, 8), "m": (1, 5)}, constants, types={"m": "int64"})

    def masked_inputs(batch: int, seed: int) -> Arrays:
        hidden = np.random.default_rng(seed).integers(0, 2, (batch, 1, 5))
        hidden[..., 0] = 0
        return {"x": random(batch, 5, 8, seed=seed), "m": hidden}

    content, inputs = lower(model_of(case)), masked_inputs(16, 1000)
    samples = [list(masked_inputs(1, seed).values()) for seed in range(100)]
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)
    (got,) = run_tflite(quantize_int8(content, samples), inputs)
    assert sqnr_db(wanted, got) >= 20  # the scores go through an exponential


def test_int8_scales_are_of_what_an_operator_reads_though_it_writes_its_result_there() -> None:
    case = Case("in place", "s = Sigmoid(x) m = Mul(s, k) y = Mul(m, k)", IMAGE, {"k": np.float32(40)})
    inputs = inputs_of(case, 4, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 20), inputs)
    assert sqnr_db(wanted, got) >= 40


def test_int8_of_a_value_that_overflows_is_a_failed_build() -> None:
    case = Case("overflow", "e = Mul(x, k) y = Exp(e)", FEATURES, {"k": np.float32(1000)})
    with pytest.raises(BuildFailed, match="not finite"):
        quantized(case, 5)


def test_int8_comparisons_that_would_abort_are_a_failed_build() -> None:
    case = Case(
        "wide", "g = Greater(x, far) y = Where(g, x, half)", FEATURES, {"far": np.float32(999), "half": np.float32(0.5)}
    )
    with pytest.raises(BuildFailed, match="the comparison that makes 'g'"):
        quantized(case, 5)


@pytest.mark.parametrize("op", ["Elu", "Floor", "Sign", "Softsign", "Sin", "Trilu"])
def test_operators_that_stay_float_are_given_floats(op: str) -> None:
    case = Case(
        "float", f"m = Mul(x, k) e = {op}(m) f = {op}(x) s = Add(e, f) y = Add(s, x)", TOKENS, {"k": np.float32(3)}
    )
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case), inputs)
    assert sqnr_db(wanted, got) >= (15 if op in ("Floor", "Sign") else SQNR_DB_MIN)  # half a step becomes a whole one


@pytest.mark.parametrize("op", ["Log", "Sqrt"])
def test_operators_whose_int8_form_older_runtimes_lack_stay_float(op: str) -> None:
    case = Case("older", f"e = Exp(x) f = {op}(e) g = {op}(x) y = Add(f, g)", FEATURES, positive=True)
    content = quantized(case)
    model = schema.Model.GetRootAs(content, 0)
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    assert [code.Version() for code in codes if code.BuiltinCode() == getattr(schema.BuiltinOperator, op.upper())] == [
        1
    ]
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_the_quantiser_refusing_a_model_is_a_failed_build() -> None:
    with pytest.raises(BuildFailed, match=r"2\.3\.0"):
        quantize_int8(b"no model", [[random(1, 4)]])
