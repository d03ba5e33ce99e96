"""tf2onnx rounds the scale of a Resize down, so that the output would be too short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.sources.onnx_graph.rewrites.resize_scales import round_scales_up
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


@pytest.mark.parametrize(("length", "wanted"), [(50, 24), (40, 24), (7, 24), (16, 32)])
def test_a_resize_gives_the_length_that_the_graph_states(length: int, wanted: int, tmp_path: Path) -> None:
    from onnx import helper

    scale = np.float32(wanted / length)
    proto = models.model(
        f"float[N,3,{length},{length}] x) => (float[N,3,{wanted},{wanted}] y",
        'z = Resize <mode = "linear"> (x, , scales) y = Relu(z)',
        {"scales": np.array([1, 1, scale, scale], np.float32)},
    )
    proto.graph.value_info.append(helper.make_tensor_value_info("z", 1, ["N", 3, wanted, wanted]))
    assert load_source(models.write(proto, tmp_path / "m.onnx")).outputs[0].shape == (-1, 3, wanted, wanted)
    assert round_scales_up(proto) == (float(scale) < wanted / length)
    assert not round_scales_up(proto)
