"""Open axes get lengths, and a batch axis moves to the front. The answers stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

pytest.importorskip("onnxruntime")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.axes import drop_unread_inputs, move_input_batches, set_lengths
from edgert_deploy.packager.sources.onnx_model import examine

CAMERA = "agraph (float[batch, 3, height, width] images) => (float[batch, 3, h, w] out) { out = Relu(images) }"
TOKENS = """
    agraph (float[batch, seq] ids, float[batch, seq] mask) => (float[batch, seq] out) { out = Mul(ids, mask) }
"""
STATEFUL = """
    agraph (float[N, 8] x, float[2, N, 8] state) => (float[N, 8] out, float[2, N, 8] next)
    { axes = Constant <value_ints = [0]> ()  sum = ReduceSum <keepdims = 0> (state, axes)  out = Add(sum, x)  next = Relu(state) }
"""
FIXED = STATEFUL.replace("N", "1")
HALF_OPEN = STATEFUL.replace(
    "2, N", "2, 1"
)  # Example: AECMOS in the package speechmos names only the batch of the sound


def model(text: str) -> Any:
    proto = helper.make_model(parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    return proto


def examined(text: str, **shapes: Sequence[float]) -> tuple[dict[str, Any], bytes]:
    return examine({"name": "m.onnx", "shapes": shapes}, model(text).SerializeToString(), lambda *words: None)


def answers(data: bytes, sample: dict[str, Any]) -> list[Any]:
    import onnxruntime

    return list(onnxruntime.InferenceSession(data).run(None, sample))


def shapes_of(answer: dict[str, Any], kind: str) -> list[list[int]]:
    return [spec["shape"] for spec in answer[kind]]


def test_an_open_axis_is_refused_with_the_option_that_fixes_it() -> None:
    with pytest.raises(SourceInvalid, match="--input images=1,3,HEIGHT,WIDTH"):
        examined(CAMERA)


def test_the_given_lengths_fix_all_axes_except_the_batch() -> None:
    answer, data = examined(CAMERA, images=[1, 3, 48, 64])
    assert shapes_of(answer, "inputs") == shapes_of(answer, "outputs") == [[-1, 3, 48, 64]]
    assert data


def test_an_axis_whose_length_is_written_as_minus_one_is_open() -> None:
    proto = model(CAMERA)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1  # Paddle's exporter writes this
    answer, data = examine(
        {"name": "m.onnx", "shapes": {"images": [1, 3, 48, 64]}}, proto.SerializeToString(), lambda *words: None
    )
    assert shapes_of(answer, "inputs") == [[-1, 3, 48, 64]]
    batch = onnx.load_from_string(data).graph.input[0].type.tensor_type.shape.dim[0]
    assert not batch.HasField("dim_value")


def test_an_axis_of_the_same_name_in_another_input_gets_the_same_length() -> None:
    answer, _ = examined(TOKENS, ids=[1, 32])
    assert shapes_of(answer, "inputs") == [[-1, 32], [-1, 32]]


def test_axes_with_the_name_question_mark_are_not_taken_for_one_axis() -> None:
    proto = model(CAMERA)
    for dim in list(proto.graph.input[0].type.tensor_type.shape.dim)[2:]:
        dim.dim_param = "?"
    changed, _ = set_lengths(proto, {"images": (1, 3, 10, 20)})
    assert changed
    assert [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim][1:] == [3, 10, 20]


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"image": [1, 3, 8, 8]}, "no such input; it has 'images'"),
        ({"images": [1, 3, 8]}, r"gives 3 axes, but the model's input has 4: \[batch, 3, height, width\]"),
        ({"images": [1, 1, 3, 8, 8]}, "gives 5 axes"),
        ({"images": [4, 3, 8, 8]}, "axis 0 is the batch.* no batch, .*: --input images=1,4,3,8,8"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(shapes: dict[str, list[int]], says: str) -> None:
    with pytest.raises(SourceInvalid, match=says):
        examined(CAMERA, **shapes)


GRAPH = """
    agraph (float[atoms, 3] place, int64[atoms] kind, int64[2, edges] edge) => (float energy, float[edges, 3] length)
    { zero = Constant <value = int64 {0}> ()  one = Constant <value = int64 {1}> ()
      from = Gather (edge, zero)  to = Gather (edge, one)  a = Gather (place, from)  b = Gather (place, to)
      length = Sub (a, b)  kinds = Cast <to = 1> (kind)  sum = ReduceSum <keepdims = 0> (kinds)
      square = ReduceSumSquare <keepdims = 0> (length)  energy = Add (sum, square) }
"""


def test_a_model_without_a_batch_gets_a_batch_axis_of_1_where_the_lengths_have_a_1_in_front() -> None:
    """Example: graph networks, whose inputs have the axes atoms and edges, but no batch."""
    with pytest.raises(SourceInvalid, match="--input edge=1,2,EDGES"):
        examined(GRAPH, place=[1, 4, 3])
    answer, data = examined(GRAPH, place=[1, 4, 3], edge=[1, 2, 5])
    assert shapes_of(answer, "inputs") == [[1, 4, 3], [1, 4], [1, 2, 5]]
    assert shapes_of(answer, "outputs") == [[1], [1, 5, 3]]
    assert "input 'kind' [atoms] is taken as [1, atoms]: with a batch axis added" in answer["remarks"]
    rng = np.random.default_rng(0)
    sample: dict[str, Any] = {
        "place": rng.standard_normal((4, 3), np.float32),
        "kind": np.arange(4),
        "edge": rng.integers(0, 4, (2, 5)),
    }
    want = answers(model(GRAPH).SerializeToString(), sample)
    for got, wanted in zip(answers(data, {k: v[None] for k, v in sample.items()}), want, strict=True):
        np.testing.assert_array_equal(got[0], wanted)


def test_the_error_for_a_fixed_input_without_a_batch_names_the_option_that_adds_one() -> None:
    text = "agraph (float[16, 3] points) => (float[16, 3] out) { out = Relu(points) }"
    with pytest.raises(SourceInvalid, match="no batch, give it a batch axis of 1: --input points=1,16,3; or"):
        examined(text)
    assert shapes_of(examined(text, points=[1, 16, 3])[0], "outputs") == [[1, 16, 3]]


SMALL = """
    agraph (float[10, 1, 8, 8] image, float[1, 1, 3, 3] w) => (float[10, 1, 6, 6] out) { out = Conv(image, w) }
"""


def fixed_at_export(text: str) -> bytes:
    proto = model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w"))
    return bytes(proto.SerializeToString())


def test_lengths_that_the_export_fixed_are_replaced_and_the_build_reports_this() -> None:
    """Example: CenterFace is published with a batch of 10 and images of 32 x 32, and users resize it."""
    with pytest.raises(SourceInvalid, match="not the batch: for images, give other lengths as --input image=1,1,8,8"):
        examine({"name": "m.onnx"}, fixed_at_export(SMALL), lambda *words: None)
    answer, data = examine(
        {"name": "m.onnx", "shapes": {"image": [1, 1, 20, 30]}}, fixed_at_export(SMALL), lambda *words: None
    )
    assert (shapes_of(answer, "inputs"), shapes_of(answer, "outputs")) == ([[1, 1, 20, 30]], [[1, 1, 18, 28]])
    assert answer["remarks"] == ["input 'image' [10, 1, 8, 8] is taken as [1, 1, 20, 30], as --input says"]
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)


def test_the_error_names_a_layer_that_does_not_accept_the_new_length() -> None:
    with pytest.raises(SourceInvalid, match=r"'image' \[10, 1, 8, 8\] is taken as \[1, 4, 8, 8\]"):
        examine({"name": "m.onnx", "shapes": {"image": [1, 4, 8, 8]}}, fixed_at_export(SMALL), lambda *words: None)


@pytest.mark.parametrize(("text", "batch"), [(STATEFUL, -1), (FIXED, 1), (HALF_OPEN, 1)])
def test_a_state_gets_its_batch_in_front_without_a_change_of_the_answers(text: str, batch: int) -> None:
    import onnxruntime

    answer, data = examined(text)
    assert shapes_of(answer, "inputs") == [[batch, 8], [batch, 2, 8]]
    assert shapes_of(answer, "outputs") == [[batch, 8], [batch, 2, 8]]
    assert "input 'state'" in answer["remarks"][0]
    own = "N" if batch == -1 else "1"
    assert answer["remarks"][-1] == f"output 'next' [2, {own}, 8] is given as [{own}, 2, 8]: the batch first"
    random = np.random.default_rng(0)
    x, state = (random.normal(size=shape).astype(np.float32) for shape in ((1, 8), (2, 1, 8)))
    before, after = (onnxruntime.InferenceSession(one) for one in (model(text).SerializeToString(), data))
    want = before.run(None, {"x": x, "state": state})
    got = after.run(None, {"x": x, "state": state.transpose(1, 0, 2)})
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1].transpose(1, 0, 2))


def test_the_batch_of_a_state_stays_open_where_its_length_is_given_as_1() -> None:
    assert shapes_of(examined(STATEFUL, state=[2, 1, 8])[0], "inputs") == [[-1, 8], [-1, 2, 8]]
    with pytest.raises(SourceInvalid, match="axis 1 is the batch, which stays open"):
        examined(STATEFUL, state=[2, 3, 8])
    other_name = STATEFUL.replace("2, N", "2, M")
    assert shapes_of(examined(other_name, state=[2, 1, 8])[0], "inputs") == [[1, 8], [1, 2, 8]]
    with pytest.raises(
        SourceInvalid, match=r"axis 0 of input 'state' \[2, 3, 8\] has 2 elements, so it is not the batch"
    ):
        examined(other_name, state=[2, 3, 8])


def test_a_renamed_value_is_also_renamed_in_a_branch_that_reads_it() -> None:
    branch = [helper.make_graph([helper.make_node(op, ["state"], [f"y{op}"])], op, [], [helper.make_tensor_value_info(f"y{op}", TensorProto.FLOAT, None)]) for op in ("Relu", "Neg")]  # fmt: skip
    choose = helper.make_node("If", ["yes"], ["out"], then_branch=branch[0], else_branch=branch[1])
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4]), helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, "N", 4])]  # fmt: skip
    graph = helper.make_graph(
        [yes, choose], "g", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert move_input_batches(proto)
    assert {node.input[0] for g in proto.graph.node[-1].attribute for node in g.g.node} == {"state/edgert_batch_inside"}


def test_the_batch_of_a_state_of_one_layer_is_moved_in_front() -> None:
    text = STATEFUL.replace("float[2, N, 8]", "float[1, N, 8]")
    assert text != STATEFUL
    answer, _ = examined(text)
    assert shapes_of(answer, "inputs") == [[-1, 8], [-1, 1, 8]]


def test_the_batch_of_a_state_is_the_only_open_axis_where_no_axis_has_a_name() -> None:
    """Example: Silero VAD 5 names no axis, in its own package and in others."""
    proto = model(STATEFUL)
    for dim in (proto.graph.input[0].type.tensor_type.shape.dim[0], proto.graph.input[1].type.tensor_type.shape.dim[1]):
        dim.Clear()
    for shapes in ({}, {"state": [2, 1, 8]}):
        answer, _ = examine({"name": "m.onnx", "shapes": shapes}, proto.SerializeToString(), lambda *words: None)
        assert shapes_of(answer, "inputs") == [[-1, 8], [-1, 2, 8]]


def test_the_batch_of_a_series_in_pytorchs_own_order_has_the_name_of_the_outputs_first_axis() -> None:
    """By default, the input of torch.nn.LSTM is [steps, N, features]."""
    text = """agraph (float[6, batch, 4] x) => (float[batch, 4] y)
        { a = Constant <value_ints = [0]> ()  y = ReduceSum <keepdims = 0> (x, a) }"""
    answer, _ = examined(text)
    assert (shapes_of(answer, "inputs"), shapes_of(answer, "outputs")) == ([[-1, 6, 4]], [[-1, 4]])
    assert answer["remarks"] == ["input 'x' [6, batch, 4] is taken as [batch, 6, 4]: the batch first"]
    # An open axis after an axis of length 1 is not the batch: a model of one recording leaves the time open.
    text = "agraph (float[1, T, 4] x) => (float[T, 4] y) { a = Constant <value_ints = [0]> () y = Squeeze (x, a) }"
    answer, _ = examined(text, x=[1, 5, 4])
    assert shapes_of(answer, "inputs") == [[1, 5, 4]]


def test_a_batch_that_some_inputs_fix_to_one_is_one_for_all_inputs() -> None:
    """Example: the inputs of Silero VAD 6 in faster-whisper are [chunks, 576] and the state of one stream."""
    answer, _ = examined(
        "agraph (float[chunks, 8] x, float[1, 1, 8] state) => (float[chunks, 8] out, float[1, 1, 8] next)"
        "{ axes = Constant <value_ints = [0]> ()  s = Squeeze (state, axes)  out = Add (x, s)  next = Relu (state) }"
    )
    assert shapes_of(answer, "inputs") == [[1, 8], [1, 1, 8]]
    assert answer["remarks"] == [
        "the batch of 'state' is 1 in the model, so the batch of its other inputs is fixed to 1, too"
    ]


def test_a_model_whose_batch_is_in_front_stays_unchanged() -> None:
    answer, data = examined("agraph (float[N, 8] x) => (float[N, 8] out) { out = Relu(x) }")
    assert answer["remarks"] == []
    assert data == b""


RATE = "agraph (float[N, 8] x, int64 rate) => (float[N, 8] out) { f = Cast <to = 1> (rate)  out = Div(x, f) }"


def test_an_input_without_axes_is_refused_with_the_option_that_gives_its_value() -> None:
    with pytest.raises(SourceInvalid, match=r"'rate' has no axes.*one number for a whole batch.*--input rate=NUMBER"):
        examined(RATE)


def test_an_input_without_axes_becomes_a_constant_of_its_own_type() -> None:
    answer, data = examined(RATE, rate=[16000])
    assert [spec["name"] for spec in answer["inputs"]] == ["x"]
    (constant,) = onnx.load_from_string(data).graph.initializer
    assert (constant.name, constant.data_type, onnx.numpy_helper.to_array(constant).item()) == ("rate", 7, 16000)


def test_an_input_that_no_operator_reads_is_left_out() -> None:
    """OpenVINO and TensorRT drop such an input, and then refuse values for it."""
    answer, data = examined("agraph (float[N, 4] x, float[M, length] types) => (float[N, 4] out) { out = Relu(x) }")
    assert [spec["name"] for spec in answer["inputs"]] == ["x"]
    assert "no operator reads input 'types'" in "; ".join(answer["remarks"])
    assert answer["unread"] == ["types"]
    assert [value.name for value in onnx.ModelProto.FromString(data).graph.input] == ["x"]


def test_an_input_that_a_branch_or_an_output_reads_is_kept() -> None:
    text = """
        agraph (bool[1] c, float[1, 4] x, float[1, 4] y, float[1, 4] z) => (float[1, 4] out, float[1, 4] z)
        { out = If <then_branch = a () => (float[1, 4] t) { t = Relu(x) }, else_branch = b () => (float[1, 4] e) { e = Neg(y) }> (c) }
    """
    proto = helper.make_model(parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert drop_unread_inputs(proto) == []
    assert [value.name for value in proto.graph.input] == ["c", "x", "y", "z"]


@pytest.mark.parametrize(("kind", "number"), [("float", 0.25), ("float", -1.5), ("int64", -1), ("float", 3)])
def test_an_input_without_axes_accepts_every_number_of_its_type(kind: str, number: float) -> None:
    text = f"agraph (float[N, 8] x, {kind} level) => (float[N, 8] out) {{ f = Cast <to = 1> (level)  out = Add(x, f) }}"
    answer, data = examined(text, level=[number])
    assert shapes_of(answer, "inputs") == [[-1, 8]]
    constants = onnx.load_from_string(data).graph.initializer
    assert {tensor.name: onnx.numpy_helper.to_array(tensor).item() for tensor in constants}["level"] == number
    if kind == "int64":
        with pytest.raises(SourceInvalid, match=r"level=0\.5: the input is int64, which does not hold this number"):
            examined(text, level=[0.5])


def test_a_length_that_is_not_a_whole_number_is_refused() -> None:
    with pytest.raises(SourceInvalid, match=r"x=1\.5,8: the lengths of axes are whole numbers"):
        set_lengths(model("agraph (float[N, 8] x) => (float[N, 8] out) { out = Relu(x) }"), {"x": [1.5, 8]})


@pytest.mark.parametrize(("value", "node"), [(True, "Relu"), (False, "Tanh")])
def test_a_flag_that_chooses_a_branch_becomes_a_constant(value: bool, node: str) -> None:
    """Example: Optimum merges the first step of a decoder with the others. `use_cache_branch` is BOOL [1]."""
    text = """agraph (float[N, 8] x, bool[1] flag) => (float[N, 8] out, float[M, 8] kept) { out, kept = If (flag) <
        then_branch = t () => (float[N, 8] a, float[M, 8] k) { a = Relu(x)  k = Constant <value = float[0, 8] {}> () },
        else_branch = e () => (float[N, 8] b, float[M, 8] l) { b = Tanh(x)  l = Neg(x) }> }"""
    answer, data = examined(text, flag=[value])
    assert shapes_of(answer, "inputs") == [[-1, 8]]
    assert [spec["name"] for spec in answer["outputs"]] == (["out"] if value else ["out", "kept"])
    assert answer["remarks"] == (["output 'kept' is always empty: it is removed"] if value else [])
    assert onnx.load_from_string(data).graph.node[0].op_type == node
    with pytest.raises(SourceInvalid, match=r"x=true: the input is float32 \[N, 8\]; only a BOOL with fixed axes"):
        examined(text, x=[True])
