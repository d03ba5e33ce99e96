"""Requirements on an ONNX model: inputs, outputs and batch axes."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")

from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_model import (
    check_batch_axes,
    check_run_size,
    check_value,
    input_specs,
    opset_of,
    output_spec,
    parse,
)
from tests.support import models

OPEN, FIXED = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("x", "FP32", (1, 4))


def test_inputs_are_those_that_are_no_weights() -> None:
    proto = models.mlp()
    assert input_specs(proto) == (OPEN,)
    assert opset_of(parse("m.onnx", proto.SerializeToString())) == 17


def test_all_inputs_leave_the_batch_open_or_none() -> None:
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
def test_axis_0_of_an_output_counts_the_samples(
    source: TensorSpec, shapes: list[tuple[int, ...]], spec: tuple[int, ...] | None
) -> None:
    if spec is not None:
        assert output_spec("y", "float32", shapes, (source,)).shape == spec
    else:
        with pytest.raises(SourceInvalid, match="axis 0"):
            output_spec("y", "float32", shapes, (source,))


def test_names_datatypes_and_sizes_have_limits() -> None:
    for name, dtype in (("", "float32"), ("x" * 256, "float32"), ("x", "text")):
        with pytest.raises(SourceInvalid):
            check_value(name, dtype)
    with pytest.raises(SourceInvalid, match="larger than"):
        check_run_size(OPEN, [2, 2**40])
