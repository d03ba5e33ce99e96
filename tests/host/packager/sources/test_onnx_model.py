"""Requirements on an ONNX model: inputs, outputs and batch axes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.sources.onnx_model import check_weights, parse
from edgert_deploy.packager.sources.tensor_specs import (
    input_specs,
)
from tests.support import models

OPEN = TensorSpec("x", "FP32", (-1, 4))


def test_the_inputs_of_a_model_do_not_include_its_weights() -> None:
    proto = models.mlp()
    assert input_specs(proto) == (OPEN,)
    assert opset_of(parse("m.onnx", proto.SerializeToString())) == 17


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_a_single_number_that_masks_values_is_no_damaged_weight(fill: float) -> None:
    """JAX's lookup gives NaN for an id out of range. The build refused such a model as diverged."""
    mask = {"none": np.float32(0), "fill": np.float32(fill)}
    body = "known = Greater (x, none) y = Where (known, x, fill)"
    check_weights(models.model("float[N,4] x) => (float[N,4] y", body, {k: np.asarray(v) for k, v in mask.items()}))


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
