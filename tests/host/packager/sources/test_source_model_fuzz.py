"""A damaged model file is described, or refused with one clear error, within the probe's bounds.

With EDGERT_FUZZ=N, each test tries N examples instead of a few dozen.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.processes.sandbox import Limits
from edgert_deploy.packager.sources.probe import EXAMINERS, MEMORY_BYTES_MIN
from edgert_deploy.packager.tflite_lowering import lower
from tests.support import models
from tests.support.stand_ins.forked import Forked

EXAMPLES = int(os.environ.get("EDGERT_FUZZ", "60"))
LIMITS = Limits(MEMORY_BYTES_MIN, 30)
LENGTHS = st.sampled_from([0, -1, 1, 2, 7, 2**20, 2**31, 2**40, 2**62])
OPERATORS = st.sampled_from(
    ["Relu", "Conv", "Gemm", "Reshape", "Loop", "If", "Resize", "LSTM", "Einsum", "Expand", "Tile"]
)
few = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def judged(probe: Forked, kind: str, data: bytes) -> bool:
    """Whether the probe accepts `data`. A refusal must be one clear line; any other error fails the test."""
    try:
        answer, _ = probe.ask(EXAMINERS[kind], {"name": "model"}, data, LIMITS)
    except SourceInvalid as error:
        said = error.message
    else:
        said = ""
    if said:
        assert 10 < len(said) < 2000, said
        assert "\n" not in said
        assert "Traceback" not in said
        return False
    assert answer["inputs"]
    assert answer["outputs"]
    return True


def damaged(data: bytes, draw: st.DataObject) -> bytes:
    """Return `data` truncated, with flipped bits, or with a removed or repeated part."""
    kind = draw.draw(st.sampled_from(["cut", "bits", "without", "twice"]))
    at = draw.draw(st.integers(0, len(data) - 1))
    if kind == "cut":
        return data[:at]
    if kind == "bits":
        changed = bytearray(data)
        for place in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=6)):
            changed[place] ^= 1 << draw.draw(st.integers(0, 7))
        return bytes(changed)
    end = min(len(data), at + draw.draw(st.integers(1, 64)))
    return data[:at] + data[end:] if kind == "without" else data[:end] + data[at:]


def operated(proto: Any, draw: st.DataObject) -> None:
    """Return the model with one field changed to a hostile value."""
    graph = proto.graph
    node, tensor = (draw.draw(st.sampled_from(list(held))) for held in (graph.node, graph.initializer))
    what = draw.draw(st.sampled_from(["op", "dims", "attribute", "shape", "wire", "type", "version", "weights"]))
    if what == "op":
        node.op_type = draw.draw(OPERATORS)
    elif what == "dims" and tensor.dims:
        tensor.dims[0] = draw.draw(LENGTHS)
    elif what == "attribute" and node.attribute:
        attribute = node.attribute[0]
        attribute.i = draw.draw(LENGTHS)
        attribute.ints[:] = draw.draw(st.lists(LENGTHS, max_size=5))
    elif what == "shape":
        dims = graph.input[0].type.tensor_type.shape.dim
        dims[draw.draw(st.integers(0, len(dims) - 1))].dim_value = draw.draw(LENGTHS)
    elif what == "wire" and node.input:
        node.input[0] = draw.draw(st.sampled_from(["", "nothing", node.output[0], tensor.name]))
    elif what == "type":
        graph.input[0].type.tensor_type.elem_type = draw.draw(st.integers(0, 40))
    elif what == "weights":
        tensor.data_type = draw.draw(st.integers(0, 40))
        tensor.raw_data = draw.draw(st.binary(max_size=40))
    else:
        proto.opset_import[0].version = draw.draw(st.sampled_from([1, 9, 11, 28, 2**40]))


MAKERS = st.sampled_from([models.cnn, models.mlp, models.transformer, models.two_by_two])


@few
@given(make=MAKERS, draw=st.data())
def test_damaged_onnx_files_are_read_or_refused(forked_probe: Forked, make: Any, draw: st.DataObject) -> None:
    judged(forked_probe, "onnx", damaged(make().SerializeToString(), draw))


@few
@given(make=MAKERS, draw=st.data())
def test_onnx_files_with_changed_fields_are_read_or_refused(
    forked_probe: Forked, make: Any, draw: st.DataObject
) -> None:
    proto = make()
    for _ in range(draw.draw(st.integers(1, 3))):
        operated(proto, draw)
    judged(forked_probe, "onnx", proto.SerializeToString())


@pytest.fixture(scope="module")
def a_tflite_file() -> bytes:
    return lower(models.cnn())


@few
@given(draw=st.data())
def test_damaged_tflite_files_are_read_or_refused(
    forked_probe: Forked, a_tflite_file: bytes, draw: st.DataObject
) -> None:
    judged(forked_probe, "tflite", damaged(a_tflite_file, draw))


def test_a_valid_model_is_accepted(forked_probe: Forked, a_tflite_file: bytes) -> None:
    assert judged(forked_probe, "onnx", models.cnn().SerializeToString())
    assert judged(forked_probe, "tflite", a_tflite_file)
