"""Requirements on inputs, outputs and batch axes."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.tensor_specs import (
    check_batch_axes,
    check_run_size,
    check_value,
    input_specs,
    output_spec,
)
from tests.support import models

OPEN, FIXED = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("x", "FP32", (1, 4))


def test_inputs_of_which_only_some_leave_the_batch_open_are_refused() -> None:
    check_batch_axes((OPEN, OPEN))
    with pytest.raises(SourceInvalid, match="'u'"):
        check_batch_axes((OPEN, TensorSpec("u", "FP32", (1, 4))))


@pytest.mark.parametrize(
    ("source", "shapes", "spec"),
    [
        (OPEN, [(1, 3), (2, 3)], (-1, 3)),
        (FIXED, [(1, 3)], (1, 3)),
        (OPEN, [(1, 3), (1, 3)], None),
        (OPEN, [(1, 3), (2, 4)], None),
        (OPEN, [(), ()], None),
        (FIXED, [(3,)], None),
    ],
)
def test_the_first_axis_of_an_output_counts_the_samples(
    source: TensorSpec, shapes: list[tuple[int, ...]], spec: tuple[int, ...] | None
) -> None:
    if spec is not None:
        assert output_spec("y", "float32", shapes, (source,)).shape == spec
    else:
        with pytest.raises(SourceInvalid, match="axis 0"):
            output_spec("y", "float32", shapes, (source,))


@pytest.mark.parametrize(("source", "shapes"), [(OPEN, [(1, 0), (2, 0)]), (FIXED, [(1, 0, 6)])])
def test_an_output_that_is_empty_is_refused(source: TensorSpec, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(
        SourceInvalid, match=r"for a sample of zeros: it is empty, or its length depends on the values; omit"
    ):
        output_spec("y", "float32", shapes, (source,))


def test_names_and_datatypes_and_sizes_outside_the_limits_are_refused() -> None:
    for name, dtype in (("", "float32"), ("x" * 256, "float32"), ("x", "text")):
        with pytest.raises(SourceInvalid):
            check_value(name, dtype)
    with pytest.raises(SourceInvalid, match="larger than"):
        check_run_size(OPEN, [2, 2**40])


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("float x", "--input x=NUMBER"),
        ("float[1,1,1,1,1,1,1,1,1] x", "9 axes; an input has at most"),
        ("float[3,8,8,3] x", "for images, give other lengths as .*export the model with the batch as axis 0"),
        ("float[N,L] x", "axis 1 of input 'x' .* is open.*--buckets"),
    ],
)
def test_an_input_of_another_shape_is_refused_with_the_next_step(signature: str, reason: str) -> None:
    with pytest.raises(SourceInvalid, match=reason):
        input_specs(models.model(f"{signature}) => (float[N,4] y", "y = Identity (x)"))


def test_all_open_axes_of_all_inputs_are_named_at_once_with_the_options_that_set_them() -> None:
    signature = "float[N,3,height,W] image, int64[N,tokens] ids, int64[N,tokens] mask, float[N,?] x, int64 rate"
    with pytest.raises(SourceInvalid) as refusal:
        input_specs(models.model(f"{signature}) => (float[N,4] y", "y = Identity (x)"))
    assert refusal.value.message == (
        "axes 2 and 3 of input 'image' [N, 3, height, W], axis 1 of input 'ids' [N, tokens], axis 1 of input 'mask' [N, tokens] "
        "and axis 1 of input 'x' [N, ?] are open; only the batch axis may be open. Without axes, an input is one number for a "
        "whole batch: 'rate'. Give the lengths and this NUMBER: --input image=1,3,HEIGHT,W --input ids=1,TOKENS "
        "--input x=1,LENGTH1 --input rate=NUMBER, or keep one open with --buckets"
    )


def test_a_second_open_axis_beside_a_bucket_gets_advice_that_works() -> None:
    proto = models.model("float[N,3,height,W] image) => (float[N,4] y", "y = Identity (image)")
    with pytest.raises(SourceInvalid) as refusal:
        input_specs(proto, [("image", 2)])
    assert refusal.value.message == (
        "axis 3 of input 'image' [N, 3, height, W] is open beside the axis of --buckets, and only one axis of 'image' may be "
        "open besides the batch: export the model with fixed lengths of its other axes, or omit --buckets and give the lengths: "
        "--input image=1,3,HEIGHT,W"
    )


def test_a_tensor_of_text_is_refused_with_an_alternative() -> None:
    with pytest.raises(SourceInvalid, match=r"docs/text\.md"):
        check_value("x", "text")
    with pytest.raises(SourceInvalid, match="--labels"):
        output_spec("y", "object", [(1,)], (FIXED,))


def test_an_unsupported_datatype_is_refused_with_the_next_step() -> None:
    with pytest.raises(SourceInvalid, match=r"bfloat16; EdgeRT supports .*: export the model with an input of one of"):
        check_value("x", "bfloat16")
    with pytest.raises(SourceInvalid, match=r"'list'; EdgeRT supports .*: omit the output from the export, or end it"):
        output_spec("y", "list", [()], (FIXED,))
