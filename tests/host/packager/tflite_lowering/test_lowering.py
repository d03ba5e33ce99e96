"""The lowering keeps the contract of a model. An error lists all unsupported parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from tests.support.models.lowering_cases import ALL_CASES, case_named
from tests.support.models.tflite_cases import (
    ABSOLUTE_TOLERANCE,
    FEATURES,
    IMAGE,
    ITEM_NUMBERS,
    NUMBERS,
    RELATIVE_TOLERANCE,
    TOKENS,
    Arrays,
    Case,
    inputs_of,
    ints,
    model_of,
    random,
    run_onnx,
    run_tflite,
)


def test_flattening_before_constant_weights_adds_no_transposition() -> None:
    case = case_named("flatten gemm")
    interpreter = Interpreter(model_content=lower(model_of(case)))
    names = [detail["name"] for detail in interpreter.get_tensor_details()]
    assert not [name for name in names if name.endswith("_native")]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("image to tokens and back", 2),  # one at the input, and one at the output
        ("tokens to signal and back", 0),
        ("signal to image", 2),
    ],
)
def test_tokens_and_images_differ_only_in_their_shapes(name: str, count: int) -> None:
    interpreter = Interpreter(model_content=lower(model_of(case_named(name))))
    names = [detail["op_name"] for detail in interpreter._get_ops_details()]
    assert names.count("TRANSPOSE") == count


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


def test_lowering_twice_gives_the_same_bytes() -> None:
    for case in ALL_CASES[:5]:
        assert lower(model_of(case)) == lower(model_of(case))


def test_all_unsupported_parts_are_listed_at_once() -> None:
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
        (
            "y = MaxPool<kernel_shape=[1,2], strides=[1,2], pads=[0,1,0,1], ceil_mode=1>(x)",
            {"x": (2, 3, 9)},
            {},
            "begins in the padding after the last element; export the model without ceil_mode",
        ),
        ("y = LRN<size=3>(x)", {"x": (2, 3, 4, 5)}, {}, "3 spatial axes"),
        (
            "y = Pad(x, p)",
            IMAGE,
            {"p": ints(1, 0, 0, 0, 0, 0, 0, 0)},
            "it pads the batch; export the model with its batch fixed to 1",
        ),
        ("y = Concat<axis=0>(x, x)", IMAGE, {}, "along the batch"),
        ('y = Einsum<equation="bcij,bjj->bci">(x, d)', {"x": (4, 7, 9), "d": (9, 9)}, {}, "takes a diagonal"),
        (
            'y = Resize<coordinate_transformation_mode="tf_crop_and_resize", axes=[2,3]>(x, r, , t)',
            IMAGE,
            {"r": np.array([0, 0, 1, 1], np.float32), "t": ints(5, 8)},
            "'tf_crop_and_resize' are not supported, only half_pixel.*cut with Slice",
        ),
        (
            'y = GridSample<mode="bicubic">(x, g)',
            {**IMAGE, "g": (5, 6, 2)},
            {},
            "'bicubic' .*use images, mode 'linear'",
        ),
        ("y = DFT<axis=0>(x)", {"x": (8, 2)}, {}, "it transforms the batch"),
        ('y = Resize<keep_aspect_ratio_policy="not_larger", axes=[2,3]>(x, , , t)', IMAGE, {"t": ints(5, 8)}, "policy"),
        ("c = Cast<to=11>(x) s = Sin(c) y = Cast<to=1>(s)", IMAGE, {}, "float64"),
        ("n = NonZero(x) c = Cast<to=1>(n) y = Relu(c)", IMAGE, {}, "NonZero"),
        (
            # At batch 1, the numbers of the items are [0], so ONNX Runtime would remove the addition.
            f"{ITEM_NUMBERS} f = Cast<to=1>(n) u = Unsqueeze(f, last) y = Add(x, u)",
            FEATURES,
            NUMBERS,
            "'u' depends on the batch; export the model with its batch fixed to 1",
        ),
    ],
)
def test_the_error_names_the_unsupported_part(
    body: str, items: Mapping[str, tuple[int, ...]], constants: Arrays, reason: str
) -> None:
    with pytest.raises(OperatorUnsupported, match=reason):
        lower(model_of(Case("unsupported", body, items, constants, opset=18)))


def test_results_of_data_dependent_length_are_the_only_reason_named_for_a_detector() -> None:
    """ONNX Runtime folds Shape and ConstantOfShape, except after an operator such as NonZero."""
    body = (
        "[first] n = NonZero(x) r = Relu(x) [second] m = NonZero(r) s = Shape(n) c = ConstantOfShape(s) d = Shape(c) "
        "e = ConstantOfShape(d) y = Relu(e) z = Cast<to=1>(m)"
    )
    with pytest.raises(OperatorUnsupported) as raised:
        lower(model_of(Case("detector", body, IMAGE, outputs="float y, float z")))
    message = raised.value.message
    assert "2 parts" in message
    assert "NonZero (node 'first'), NonZero (node 'second'): the data determine how many results it gives" in message
    assert "without NMS, and build with --postprocess (docs/answers.md)" in message
    assert "Shape" not in message


def test_a_softmax_over_several_axes_is_refused() -> None:
    """Only before opset 13 is a Softmax over several axes.

    A build raises the opset, so that it has one axis.
    """
    with pytest.raises(OperatorUnsupported, match="axis 1 and all later axes count as one axis"):
        lower(model_of(Case("old", "y = Softmax(x)", TOKENS, opset=11)))
