"""The layers of an ONNX artifact, compared with the operators that ONNX Runtime makes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.engines.onnxruntime import sdk
from edgert_deploy.packager.builders import qdq
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer, int8_share
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import samples_for

CONV_MACS, GEMM_MACS = 8 * 6 * 6 * 2 * 3 * 3, 8 * 4


def test_multiply_accumulates_are_counted_for_one_sample(tmp_path: Path) -> None:
    assert _heavy(models.write(models.cnn(), tmp_path / "m.onnx")) == [
        ArtifactLayer("Conv", "fp32", CONV_MACS),
        ArtifactLayer("Gemm", "fp32", GEMM_MACS),
    ]
    attention = [layer.macs for layer in _heavy(models.write(models.transformer(), tmp_path / "t.onnx"))]
    assert attention == [6 * 8 * 8] * 3 + [6 * 6 * 8] * 2 + [8 * 3]


@pytest.mark.parametrize(
    ("signature", "body", "weights", "macs"),
    [
        ("float[N,4,5,5] x) => (float[N,6,M,M] y", "y = Conv <group = 2> (x, w)", (6, 2, 3, 3), 6 * 3 * 3 * 2 * 9),
        ("float[N,4,5,5] x) => (float[N,3,M,M] y", "y = ConvTranspose(x, w)", (4, 3, 2, 2), 4 * 25 * 3 * 4),
        ("float[4,3] x) => (float[3,5] y", "y = Gemm <transA = 1> (x, w)", (4, 5), 3 * 5 * 4),
        ("float[2,N,3] x) => (float[2,1,N,5] y", "y = LSTM <hidden_size = 5> (x, w, r)", (1, 20, 3), 2 * 20 * (3 + 5)),
    ],
)
def test_each_kind_of_layer_is_counted(
    signature: str, body: str, weights: tuple[int, ...], macs: int, tmp_path: Path
) -> None:
    arrays = {"w": models.random(*weights)}
    if "LSTM" in body:
        arrays["r"] = models.random(1, 20, 5)
    path = models.write(models.model(signature, body, arrays), tmp_path / "m.onnx")
    assert [layer.macs for layer in _heavy(path)] == [macs]


def test_a_graph_whose_convolutions_stay_in_float_has_a_small_share(tmp_path: Path) -> None:
    path = _quantized(("Gemm",), tmp_path)
    layers = {layer.kind: layer.precision for layer in _heavy(path)}
    assert layers == {"Conv": "fp32", "Gemm": "int8"}
    assert int8_share(onnx_layers(path)) == pytest.approx(GEMM_MACS / (CONV_MACS + GEMM_MACS))
    assert not any("QLinearConv" in kind for kind in _operators(path, tmp_path))


def test_onnx_runtime_computes_in_int8_the_layers_that_count_as_int8(tmp_path: Path) -> None:
    path = _quantized(None, tmp_path)
    assert {layer.precision for layer in _heavy(path)} == {"int8"}
    operators = _operators(path, tmp_path)
    assert operators["QLinearConv"] == 1
    assert operators["QGemm"] == 1


def test_a_convolution_whose_result_stays_float_counts_as_float_only_in_onnx_runtime(tmp_path: Path) -> None:
    import onnx

    path = _quantized(None, tmp_path)
    proto = onnx.load(path)
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    proto.graph.output.append(onnx.ValueInfoProto(name=conv.output[0]))
    path.write_bytes(proto.SerializeToString())
    in_onnxruntime = onnx_layers(path, needs_quantized_result=True)
    assert next(layer.precision for layer in in_onnxruntime if layer.kind == "Conv") == "fp32"
    assert next(layer.precision for layer in onnx_layers(path) if layer.kind == "Conv") == "int8"
    assert "QLinearConv" not in _operators(path, tmp_path)


def test_a_layer_quantized_to_16_bits_does_not_count_as_int8(tmp_path: Path) -> None:
    import onnx

    body = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, d)"
    for kind, precision in ((onnx.TensorProto.UINT16, "fp32"), (onnx.TensorProto.UINT8, "int8")):
        proto = models.model("float[4,4] x) => (float[4,4] y", body, {"s": models.random()}, opset=21, ir_version=10)
        proto.graph.initializer.append(onnx.helper.make_tensor("z", kind, (), [0]))
        assert [layer.precision for layer in _heavy(models.write(proto, tmp_path / "m.onnx"))] == [precision]


def _heavy(path: Path) -> list[ArtifactLayer]:
    return [layer for layer in onnx_layers(path) if layer.macs != 0]


def _quantized(ops: tuple[str, ...] | None, folder: Path) -> Path:
    source = load_source(models.write(models.cnn(), folder / "m.onnx"))
    qdq.write_proto(qdq.quantize(source, samples_for(source), qdq.Recipe("uint8", ops)), folder / "int8.onnx")
    return folder / "int8.onnx"


def _operators(path: Path, folder: Path) -> Counter[str]:
    """Return the operators that ONNX Runtime executes for the file."""
    import onnx

    onnxruntime: Any = sdk()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)
