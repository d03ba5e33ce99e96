"""Zeros that a Pad adds before a MaxPool take part in the maximum, in the source and in each artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.sources.onnx_graph.rewrites.zero_pads import NEGATIVE_ZERO
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for

POOL = "y = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>"
CONV = "c = Conv<pads = [1, 1, 1, 1]>(x, w, b)"
PADS = np.array([0, 0, 1, 1, 0, 0, 1, 1])
WEIGHTS = {"w": models.random(4, 3, 3, 3), "b": np.full(4, -8, np.float32), "p": PADS}


def loaded(body: str, tmp_path: Path, number: str = "float", opset: int = 17, **weights: Any) -> SourceModel:
    signature = f"{number}[N,3,8,8] x) => ({number}[N,C,4,4] y"
    proto = models.model(signature, body, {**WEIGHTS, **weights}, opset=opset)
    return load_source(models.write(proto, tmp_path / "m.onnx"))


def exact(source: SourceModel, x: models.Array) -> models.Array:
    """Return the answer of ONNX's reference implementation of the operators."""
    from onnx.reference import ReferenceEvaluator

    (answer,) = ReferenceEvaluator(source.proto).run(None, {"x": x})
    return np.asarray(answer)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_max_pool_takes_the_zeros_of_a_pad_before_negative_values(engine: str, precision: Any, tmp_path: Path) -> None:
    source = loaded(f"{CONV} q = Pad(c, p) {POOL}(q)", tmp_path)
    samples = samples_for(source)
    want = exact(source, samples.inputs["x"])
    assert (want[:, :, 0] >= 0).all()
    assert want.min() < -5
    np.testing.assert_allclose(reference_outputs(source, samples)[0], want, atol=1e-4)
    artifact = build(engine, source, samples, precision, tmp_path / "out")
    got = artifact_outputs(artifact, source, samples)[0]
    np.testing.assert_allclose(got, want, atol={"fp32": 1e-3, "fp16": 0.05}.get(precision, 0.02 * np.ptp(want)))


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (f"q = Pad(x, p, v) {POOL}(q)", {"v": np.array(0, np.float32)}),
        (f"v = Constant<value = float {{0}}>() q = Pad(x, p, v) {POOL}(q)", {}),
        (f"q = Pad(x, p) {POOL}(q)", {"number": "double"}),
        (f"q = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1]>(x) {POOL}(q)", {"opset": 10}),
        (f"q = Pad(x, p) i = Identity(q) {POOL}(i)", {}),
        (f"q = Pad(x, n) t = Transpose<perm = [0, 3, 1, 2]>(q) {POOL}(t)", {"n": np.roll(PADS, -1)}),
    ],
    ids=["value", "constant", "double", "opset 10", "identity", "transpose"],
)
def test_each_form_of_a_pad_is_found(body: str, more: dict[str, Any], tmp_path: Path) -> None:
    if "Transpose" in body:
        body = f"l = Transpose<perm = [0, 2, 3, 1]>(x) {body.replace('Pad(x', 'Pad(l')}"
    source = loaded(body, tmp_path, **more)
    x = (models.random(2, 3, 8, 8) - 6).astype(source.inputs[0].dtype)
    samples = samples_for(source)
    samples.inputs["x"] = x
    np.testing.assert_array_equal(reference_outputs(source, samples)[0], exact(source, x))


def test_a_float_build_of_a_quantized_model_keeps_the_zeros(tmp_path: Path) -> None:
    body = f"{CONV} q = Pad(c, p) i = QuantizeLinear(q, s, z) d = DequantizeLinear(i, s, z) {POOL}(d)"
    source = loaded(body, tmp_path, opset=19, s=np.array(0.25, np.float32), z=np.array(0, np.int8))
    samples = samples_for(source)
    artifact = build("onnxruntime", source, samples, "fp32", tmp_path / "out")
    got = artifact_outputs(artifact, source, samples)[0]
    assert source.quantized
    np.testing.assert_allclose(got, exact(source, samples.inputs["x"]), atol=0.13)


@pytest.mark.parametrize(
    "body",
    [
        f"r = Relu(x) q = Pad(r, p) {POOL}(q)",
        f'q = Pad<mode = "edge">(x, p) {POOL}(q)',
        f"q = Pad(x, p, m) {POOL}(q)",
        "q = Pad(x, p) y = Conv<strides = [2, 2]>(q, w, b)",
    ],
    ids=["relu", "edge", "-inf", "convolution"],
)
def test_a_pad_that_engines_optimize_correctly_stays_unchanged(body: str, tmp_path: Path) -> None:
    source = loaded(body, tmp_path, m=np.array(-np.inf, np.float32))
    assert not any(tensor.name.startswith(NEGATIVE_ZERO) for tensor in source.proto.graph.initializer)
