"""Every kind of input and output through every builder and its engine: tokens, masks, bytes, several of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.engines.tensorrt import build_plan
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build
from tests.support.needed import needed

needed("nncf")

TOKENS = 40
pytestmark = pytest.mark.usefixtures("probes_are_forks")


def tokens_and_mask(batch: str) -> Any:
    """Token ids (INT64) and a mask (BOOL) to scores, and an embedding for each token."""
    body = """
        e = Gather (table, ids)
        m = Cast <to = 1> (mask)
        u = Unsqueeze (m, last)
        h = Mul (e, u)
        z = MatMul (h, w)
        states = Relu (z)
        p = ReduceMean <axes = [1], keepdims = 0> (states)
        scores = Gemm (p, v, b)
    """
    weights: dict[str, Any] = {"table": models.random(TOKENS, 8), "w": models.random(8, 8), "last": np.array([2])}
    weights |= {"v": models.random(8, 3), "b": models.random(3)}
    signature = f"int64[{batch},6] ids, bool[{batch},6] mask) => (float[{batch},3] scores, float[{batch},6,8] states"
    return models.model(signature, body, weights)


def image_and_numbers(batch: str) -> Any:
    """A picture (FP32), numbers (FP32) and a switch (INT32): like the inputs of a robot's policy."""
    body = """
        c = Conv <kernel_shape = [3, 3], strides = [2, 2]> (image, w1, b1)
        r = Relu (c) g = GlobalAveragePool (r) f = Flatten (g)
        k = Cast <to = 1> (mode)
        j = Concat <axis = 1> (f, numbers, k)
        action = Gemm (j, w2, b2)
    """
    weights = {
        "w1": models.random(8, 3, 3, 3),
        "b1": models.random(8),
        "w2": models.random(14, 4),
        "b2": models.random(4),
    }
    signature = (
        f"float[{batch},3,9,9] image, float[{batch},5] numbers, int32[{batch},1] mode) => (float[{batch},4] action"
    )
    return models.model(signature, body, weights)


def bytes_and_choice(batch: str) -> Any:
    """Pixels of a camera (UINT8) to scores, and the best class (INT64)."""
    body = """
        x = Cast <to = 1> (pixels) s = Div (x, most)
        c = Conv <kernel_shape = [3, 3]> (s, w1, b1) r = Relu (c)
        g = GlobalAveragePool (r) f = Flatten (g)
        scores = Gemm (f, w2, b2)
        choice = ArgMax <axis = 1, keepdims = 0> (scores)
    """
    weights: dict[str, Any] = {"most": np.asarray(np.float32(255)), "w1": models.random(8, 3, 3, 3)}
    weights |= {"b1": models.random(8), "w2": models.random(8, 4), "b2": models.random(4)}
    signature = f"uint8[{batch},3,8,8] pixels) => (float[{batch},4] scores, int64[{batch}] choice"
    return models.model(signature, body, weights)


def samples_for(source: SourceModel, count: int = 24) -> CalibrationSet:
    random = np.random.default_rng(1)

    def values(spec: TensorSpec) -> Any:
        shape = (count, *spec.item_shape)
        if spec.datatype == "FP32":
            return random.standard_normal(shape, np.float32)
        most = {"BOOL": 2, "UINT8": 256, "INT32": 3}.get(spec.datatype, TOKENS)
        return random.integers(0, most, shape).astype(spec.dtype)

    return CalibrationSet({spec.name: values(spec) for spec in source.inputs}, None)


@pytest.mark.parametrize("batch", ["N", "1"])
@pytest.mark.parametrize("make", [tokens_and_mask, image_and_numbers, bytes_and_choice], ids=lambda make: make.__name__)
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_every_kind_of_model_keeps_its_answers(engine: str, make: Any, batch: str, tmp_path: Path) -> None:
    source = load_source(models.write(make(batch), tmp_path / "m.onnx"))
    assert source.inputs[0].shape[0] == (-1 if batch == "N" else 1)
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / "out")
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    for spec, one, other in zip(source.outputs, want, got, strict=True):
        assert one.dtype == other.dtype == spec.dtype
        if spec.dtype.kind == "f":
            assert (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other) > 0.99
        else:
            assert (one == other).mean() > 0.8


@pytest.mark.parametrize("make", [tokens_and_mask, image_and_numbers, bytes_and_choice], ids=lambda make: make.__name__)
def test_tensorrt_rtx_builds_every_kind_without_a_gpu(make: Any, tmp_path: Path) -> None:
    rtx = pytest.importorskip(
        "tensorrt_rtx_bindings", reason="pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings"
    )
    source = load_source(models.write(make("N"), tmp_path / "m.onnx"))
    artifact = build("tensorrt", source, samples_for(source), "int8", tmp_path / "out")

    def for_a_gpu_that_is_not_here(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM86, 0)

    ignored: list[str] = []
    content = artifact.path.read_bytes()
    assert build_plan(rtx, content, source.inputs, 8, ignored.append, for_a_gpu_that_is_not_here)
