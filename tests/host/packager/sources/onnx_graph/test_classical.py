"""Models of scikit-learn, XGBoost and LightGBM are built for ONNX Runtime in FP32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import AccuracyTooLow, ConfigInvalid, OperatorUnsupported, SourceInvalid
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.processing import read_classify, read_postprocess
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.classical import (
    classical_operators,
    is_classical,
    is_float_only,
    scores_of_pairs,
    unwrap_maps,
)
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.models import classical
from tests.support.packs import candidates_of, pack
from tests.support.profiles import profile


def build_request(path: Path, *targets: Any, labelled: bool = True, **more: Any) -> BuildRequest:
    source = load_source(path)
    name = source.inputs[0].name
    rows, labels = classical.samples(200)
    return BuildRequest(
        source=source,
        calibration=CalibrationSet({name: rows[:100]}, None),
        holdout=CalibrationSet({name: rows[100:]}, labels[100:] if labelled else None),
        targets=targets,
        model="sensors",
        **more,
    )


def test_operators_of_classical_models_are_known() -> None:
    assert classical_operators(classical.tree()) == ("TreeEnsembleClassifier",)
    assert is_float_only(classical.tree())
    for proto in (None, models.mlp()):
        assert classical_operators(proto) == ()
        assert not is_float_only(proto)
    network = models.model("float[N,4] x) => (float[N,3] y", "y = MatMul(x, w)", {"w": models.random(4, 3)})
    network.graph.node.extend(classical.tree().graph.node)
    assert classical_operators(network) == ("TreeEnsembleClassifier",)
    assert not is_float_only(network)


def test_a_network_that_onnxmltools_converted_is_not_classical() -> None:
    """OnnxMLTools converted Keras models, such as DTLN, and writes operators of ai.onnx.ml for trees only."""
    for proto, expected in ((models.mlp(), False), (classical.tree(), True)):
        proto.producer_name = "OnnxMLTools"
        assert is_classical(proto) == expected


def test_a_list_of_maps_is_replaced_by_the_tensor_of_its_scores() -> None:
    source = load_source(classical.BOOSTING)
    assert [(spec.datatype, spec.shape) for spec in source.outputs] == [("INT64", (-1,)), ("FP32", (-1, 3))]
    assert any("list of maps, is given as the tensor" in remark for remark in source.remarks)
    assert unwrap_maps(classical.tree()) == ()


def with_words(outputs: str) -> Any:
    """Return the tree with words as classes, which are common in scikit-learn."""
    proto = classical.tree(outputs)
    labels = next(a for a in proto.graph.node[0].attribute if a.name == "classlabels_int64s")
    labels.name, labels.type = "classlabels_strings", labels.STRINGS
    del labels.ints[:]
    labels.strings.extend([b"cold", b"warm", b"hot"])
    return proto


def test_outputs_with_labels_of_text_are_left_out_and_the_scores_stay(tmp_path: Path) -> None:
    proto = with_words("string[N] label, float[N,3] scores")
    proto.graph.node.append(helper.make_node("Identity", ["label"], ["shown"]))
    proto.graph.output[0].name = "shown"
    zipped = helper.make_node(
        "ZipMap", ["scores"], ["maps"], domain="ai.onnx.ml", classlabels_strings=["cold", "warm", "hot"]
    )
    proto.graph.node.append(zipped)
    maps = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    proto.graph.output[1].CopyFrom(helper.make_value_info("maps", helper.make_sequence_type_proto(maps)))
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [(spec.name, spec.datatype, spec.shape) for spec in source.outputs] == [("maps", "FP32", (-1, 3))]
    assert [node.op_type for node in source.proto.graph.node] == ["TreeEnsembleClassifier", "Cast"]
    assert "output 'shown' is text, and is removed" in source.remarks[-1]
    assert source.remarks[-1].endswith("in order: cold, warm, hot")


def svm(kind: str, **more: Any) -> Any:
    """Return a support vector machine with two classes, as skl2onnx writes it."""
    labels = {"classlabels_strings": ["a", "b"]} if kind == "string" else {"classlabels_ints": [0, 1]}
    vectors: dict[str, Any] = {"support_vectors": [-1.0, 1.0], "vectors_per_class": [1, 1], "coefficients": [-1.0, 1.0]}
    node = helper.make_node(
        "SVMClassifier", ["x"], ["label", "raw"], domain="ai.onnx.ml", kernel_type="LINEAR", rho=[0.0], **labels, **vectors,
        kernel_params=[1.0, 0.0, 3.0], **more,
    )  # fmt: skip
    proto = models.model(f"float[N,1] x) => ({kind}[N] label, float[N,2] scores", "scores = Identity(x)")
    proto.graph.node[0].input[0] = "raw"
    proto.graph.node.insert(0, node)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    return proto


def test_scores_of_an_svm_without_probabilities_are_not_taken_for_classes(tmp_path: Path) -> None:
    """The larger score of an SVC with two classes is always the score of the other class."""
    (tmp_path / "labels.txt").write_text("a\nb")
    (tmp_path / "post.toml").write_text('[classify]\noutput = "scores"')
    with pytest.raises(
        SourceInvalid, match=r"'label' is text.*SVC\(probability=True\), or train the model on the numbers"
    ):
        load_source(models.write(svm("string"), tmp_path / "m.onnx"))
    source = load_source(models.write(svm("int64"), tmp_path / "m.onnx"))
    with pytest.raises(ConfigInvalid, match="let your app read its label"):
        read_classify(tmp_path / "labels.txt", source)
    with pytest.raises(ConfigInvalid, match="let your app read its label"):
        read_postprocess(tmp_path / "post.toml", source, None)
    assert scores_of_pairs(svm("string", prob_a=[-1.0], prob_b=[0.0])) == ()


def test_a_model_with_only_outputs_of_text_is_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match=r"'label' is text; .*numbers of the classes.* --labels"):
        load_source(models.write(with_words("string[N] label"), tmp_path / "m.onnx"))


def test_the_maps_of_a_model_in_fp64_become_fp32(tmp_path: Path) -> None:
    """ZipMap accepts FP32 only, but skl2onnx writes it after FP64 if the training data was FP64."""
    text = "y = MatMul(x, w)\n z = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (y)"
    proto = models.model("double[N,4] x) => (float[N,3] z", text, {"w": models.random(4, 3).astype(np.float64)})
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    (output,) = load_source(models.write(proto, tmp_path / "m.onnx")).outputs
    assert (output.datatype, output.shape) == ("FP32", (-1, 3))


def test_an_input_of_text_is_refused_with_the_next_step(tmp_path: Path) -> None:
    proto = models.model("string[N,1] x) => (string[N,1] y", "y = Identity(x)")
    with pytest.raises(SourceInvalid, match=r"'x' is text; .*encode categories as numbers.*docs/text\.md"):
        load_source(models.write(proto, tmp_path / "m.onnx"))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_model_of_scikit_learn_is_packed_in_fp32_for_onnx_runtime_alone(
    labelled: bool, signing_key: SigningKey, tmp_path: Path
) -> None:
    """The profile's first engine and INT8 do not fit, and one warning says this.

    The answers do not change.
    """
    import onnxruntime

    target = profile("box", "openvino", then=("onnxruntime", "tflite"))
    request = build_request(classical.BOOSTING, target, labelled=labelled)
    result = pack(request, signing_key, tmp_path / "b.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-fp32"]
    assert candidates_of(result)[0].result.accuracy.metric == ("top1" if labelled else "values+top1")
    assert candidates_of(result)[0].result.accuracy.fp32 > 0.9
    about = [text for text in result.warnings if "TreeEnsembleClassifier" in text]
    (warning,) = about  # one warning for all engines and targets
    assert "only onnxruntime computes" in warning
    assert "nothing to quantize" in warning
    left_out = {each.engine: each.reason for choice in result.choices for each in choice.left_out}
    assert set(left_out) == {"openvino", "tflite"}
    assert "openvino does not support TreeEnsembleClassifier" in left_out["openvino"]
    with open_bundle(result.path, None) as bundle:
        assert bundle.manifest.targets[0].artifacts == ("onnxruntime-fp32",)
        packed = bundle.read_file(bundle.manifest.artifacts[0].entry, 10**6)
    rows = request.holdout.inputs["X"]
    got = onnxruntime.InferenceSession(packed).run(None, {"X": rows})
    want = onnxruntime.InferenceSession(classical.BOOSTING).run(None, {"X": rows})
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], [[one[c] for c in range(3)] for one in want[1]])


def test_a_target_without_onnx_runtime_is_refused_and_a_request_for_int8_is_refused(
    signing_key: SigningKey, tmp_path: Path
) -> None:
    path = models.write(classical.tree(), tmp_path / "tree.onnx")
    for engine in ("tflite", "openvino", "tensorrt"):
        with pytest.raises(
            OperatorUnsupported, match=f"{engine} does not support TreeEnsembleClassifier.*only onnxruntime"
        ):
            pack(build_request(path, profile("one", engine)), signing_key, tmp_path / "b.edgert")
    request = build_request(path, profile("one"))
    for precision in ("int8", "fp16"):
        with pytest.raises(ConfigInvalid, match=f"--precision {precision}: the model consists of TreeEnsemble.*FP32"):
            pack(replace(request, precision=precision), signing_key, tmp_path / "b.edgert")
    result = pack(replace(request, precision="auto"), signing_key, tmp_path / "b.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-fp32"]
    assert not [text for text in result.warnings if "not INT8" in text]


@pytest.mark.parametrize("precision", ["int8", "auto"])
def test_k_means_gets_the_precision_that_keeps_its_clusters(
    precision: str, signing_key: SigningKey, tmp_path: Path
) -> None:
    """k-means has no operator of ai.onnx.ml. Without --precision, the build only tries the profile's INT8."""
    import onnxruntime

    request = build_request(classical.KMEANS, profile("one"), labelled=False, budget=0)
    assert is_classical(request.source.proto)
    assert not is_classical(models.mlp())
    if precision == "int8":
        with pytest.raises(AccuracyTooLow, match="allow FP16 or FP32 with --precision auto"):
            pack(replace(request, precision="int8"), signing_key, tmp_path / "b.edgert")
        return
    result = pack(request, signing_key, tmp_path / "b.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-fp32"]
    assert any("gets FP32, not INT8" in text for text in result.warnings)
    rows = request.holdout.inputs["X"]
    with open_bundle(result.path, None) as bundle:
        packed = bundle.read_file(bundle.manifest.artifacts[0].entry, 10**6)
    got, want = (onnxruntime.InferenceSession(one).run(None, {"X": rows}) for one in (packed, classical.KMEANS))
    np.testing.assert_array_equal(got[0], want[0])
