"""Requirements on an ONNX model: inputs, outputs and batch axes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.sources.onnx_model import parse
from edgert_deploy.packager.sources.tensor_specs import (
    check_batch_axes,
    check_run_size,
    check_value,
    input_specs,
    output_spec,
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


@pytest.mark.parametrize(("source", "shapes"), [(OPEN, [(1, 0), (2, 0)]), (FIXED, [(1, 0, 6)])])
def test_an_output_that_is_empty_is_refused(source: TensorSpec, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(
        SourceInvalid, match=r"for a sample of zeros: it is empty, or its length depends on the values; leave"
    ):
        output_spec("y", "float32", shapes, (source,))


def test_names_datatypes_and_sizes_have_limits() -> None:
    for name, dtype in (("", "float32"), ("x" * 256, "float32"), ("x", "text")):
        with pytest.raises(SourceInvalid):
            check_value(name, dtype)
    with pytest.raises(SourceInvalid, match="larger than"):
        check_run_size(OPEN, [2, 2**40])


PEAK_OF_EXAMINE = """
import re, sys
from pathlib import Path
from edgert_deploy.packager.sources.onnx_model import examine
import onnx, onnxruntime
def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = kilobytes("VmRSS")
path = Path(sys.argv[1])
examine({"name": path.name, "folder": str(path.parent)}, path.read_bytes(), print)
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.parametrize("beside", [False, True], ids=["weights-inside", "weights-beside"])
def test_an_examination_holds_the_weights_at_most_three_times(beside: bool, tmp_path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    weights = [numpy_helper.from_array(np.ones((2048, 2048), np.float32), f"w{i}") for i in range(8)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(8)]
    first, last = (helper.make_tensor_value_info(name, 1, ["N", 2048]) for name in ("x0", "x8"))
    graph = helper.make_graph(nodes, "g", [first], [last], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=beside, location="m.data")
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    command = [sys.executable, "-c", PEAK_OF_EXAMINE, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 3.3 * size
