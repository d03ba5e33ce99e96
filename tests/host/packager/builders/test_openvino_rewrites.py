"""OpenVINO's artifacts with nodes that OpenVINO would compute wrongly or not compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders import Precision
from edgert_deploy.packager.builders.openvino_rewrites import with_products
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build, samples_for
from tests.support.needed import needed

needed("nncf")


def answers(
    source: SourceModel, samples: CalibrationSet, precision: Precision, folder: Path
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return the answer of OpenVINO's artifact and of the source, for each output."""
    artifact = build("openvino", source, samples, precision, folder)
    return list(zip(artifact_outputs(artifact, source, samples), reference_outputs(source, samples), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_positions_of_a_funnel_transformer_are_right(precision: Precision, tmp_path: Path) -> None:
    body = (
        'p = GatherElements<axis=0>(e, i) k = Einsum<equation="td,dnh->tnh">(p, w) '
        'y = Einsum<equation="binh,tnh->bnit">(x, k)'
    )
    places = np.repeat(np.arange(40, 8, -1)[:, None], 32, axis=1)
    weights = {"e": models.random(64, 32, seed=1) - 0.5, "i": places, "w": models.random(32, 4, 8, seed=2) - 0.5}
    proto = models.model("float[N,16,4,8] x) => (float[N,4,16,32] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = samples_for(source)
    ((answer, expected),) = answers(source, samples, precision, tmp_path / "out")
    assert np.abs(answer - expected).max() < (1e-4 if precision == "fp32" else 0.1) * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("op", "shape", "lengths"), [("Mul", (1, 1, 3, 1), (3, 9)), ("Mul", (3,), (3,)), ("Div", (4, 3, 3), (3, 3))]
)
def test_the_product_with_a_constant_of_positions_before_a_convolution_is_right(
    precision: Precision, op: str, shape: tuple[int, ...], lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """OpenVINO multiplies the weights by such a constant if its lengths equal those of the kernel, as in CSATv2."""
    kernel = ["3"] * len(lengths)
    body = f'm = {op}(x, c) y = Conv<kernel_shape=[{",".join(kernel)}], auto_pad="SAME_UPPER">(m, w)'
    weights = {"c": models.random(*shape, seed=1) + 3, "w": models.random(5, 4, *map(int, kernel), seed=2)}
    item = ",".join(map(str, lengths))
    source = load_source(
        models.write(models.model(f"float[N,4,{item}] x) => (float[N,5,{item}] y", body, weights), tmp_path / "m.onnx")
    )
    samples = samples_for(source)
    ((answer, expected),) = answers(source, samples, precision, tmp_path / "out")
    assert np.abs(answer - expected).max() < (1e-4 if precision == "fp32" else 0.05) * np.abs(expected).max()


@pytest.mark.parametrize("buckets", ["", "tokens=4,8"])
def test_the_attention_of_as_many_heads_as_tokens_is_right(buckets: str, tmp_path: Path) -> None:
    body = (
        "m = MatMul(x, w) n = Reshape(m, apart) t = Transpose<perm=[2,0,3,1,4]>(n) q1, k1, v1 = Split<axis=0>(t, parts)"
        "q = Squeeze(q1, first) k = Squeeze(k1, first) v = Squeeze(v1, first) kt = Transpose<perm=[0,1,3,2]>(k)"
        "s = MatMul(q, kt) p = Softmax<axis=-1>(s) o = MatMul(p, v) h = Transpose<perm=[0,2,1,3]>(o)"
        "y = Reshape(h, joined)"
    )
    numbers = {"apart": [0, 0, 3, 4, 8], "parts": [1, 1, 1], "first": [0], "joined": [0, 0, 32]}
    weights: dict[str, Any] = {name: np.array(row) for name, row in numbers.items()}
    weights["w"] = (models.random(32, 96, seed=1) - 0.5) * 0.3
    tokens = "tokens" if buckets else "4"
    proto = models.model(f"float[N,{tokens},32] x) => (float[N,{tokens},32] y", body, weights)
    read = Conversion(buckets=read_buckets(buckets, [])) if buckets else None
    source = load_source(models.write(proto, tmp_path / "m.onnx"), read)
    rows = CalibrationSet({"x": models.random(12, 4, 32, seed=2) - 0.5}, None)
    samples = replace(rows, lengths=np.full(12, 4), buckets=source.buckets) if buckets else rows
    ((answer, expected),) = answers(source, samples, "fp32", tmp_path / "out")
    np.testing.assert_allclose(answer, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("equation", "shapes", "is_product"),
    [
        ("binh,tnh->bnit", [(2, 5, 3, 4), (6, 3, 4)], True),
        ("bind, snd -> bsin", [(2, 5, 3, 4), (6, 3, 4)], True),
        ("bcij,dc->bidj", [(2, 4, 5, 3), (6, 4)], True),
        ("bind,bjnd->bnij", [(2, 5, 3, 4), (2, 6, 3, 4)], False),
        ("td,dnh->tnh", [(5, 4), (4, 3, 2)], False),
        ("bij,ij->bi", [(2, 3, 4), (3, 4)], False),
    ],
)
def test_only_an_einsum_that_broadcasts_its_second_operand_becomes_a_product(
    equation: str, shapes: list[tuple[int, ...]], is_product: bool
) -> None:
    from onnx.reference import ReferenceEvaluator

    left, right = (models.random(*shape, seed=i) for i, shape in enumerate(shapes))
    rank = len(equation.replace(" ", "").partition("->")[2])
    text = f"float{list(left.shape)} x) => (float[{', '.join('abcdef'[:rank])}] y"
    proto = models.model(text, f'y = Einsum<equation="{equation}">(x, w)', {"w": right})
    changed: Any = with_products(proto)
    assert ("MatMul" in {node.op_type for node in changed.graph.node}) == is_product
    (answer,) = ReferenceEvaluator(changed).run(None, {"x": left})
    np.testing.assert_allclose(answer, np.einsum(equation.replace(" ", ""), left, right), rtol=1e-5)


def test_the_best_rows_of_the_first_values_compile_as_in_the_heads_of_yolo26(tmp_path: Path) -> None:
    body = """
        boxes = Slice(x, zero, four, last) rest = Slice(x, four, six, last)
        h = Relu(rest) best, places = TopK<axis=1>(h, three)
        y = GatherElements<axis=1>(boxes, i) z = ReduceMax<axes=[2], keepdims=0>(best)
    """
    numbers = {name: np.array([value]) for name, value in [("zero", 0), ("four", 4), ("six", 6), ("three", 3)]}
    weights = {**numbers, "last": np.array([-1]), "i": np.array([[[2, 0, 1, 3]] * 3])}
    proto = models.model("float[1,9,6] x) => (float[1,3,4] y, float[1,3] z", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = samples_for(source)
    for answer, expected in answers(source, samples, "fp32", tmp_path / "out"):
        np.testing.assert_allclose(answer, expected, rtol=1e-6)
