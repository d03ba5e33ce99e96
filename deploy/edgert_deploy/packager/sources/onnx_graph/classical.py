"""Classical models of scikit-learn, XGBoost and LightGBM: ONNX with operators of `ai.onnx.ml`.

Only ONNX Runtime supports these operators. Trees only compare numbers, so INT8 or FP16 would save nothing.
"""

from __future__ import annotations

from typing import Any

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.branches import remove_unused
from edgert_deploy.packager.sources.onnx_graph.nodes import attribute_of, nodes_of
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of

DOMAIN = "ai.onnx.ml"
CLASSES_SHOWN_MAX = 20
IDENTITY_OPSET = 17  # the opset given to a model that uses no operators of ONNX itself
# The converter of scikit-learn. Some of its models, such as k-means, have no operator of `ai.onnx.ml`. OnnxMLTools also
# converted networks of Keras; its classical models have such operators.
PRODUCER = "skl2onnx"
# Operators that are worth quantizing. Converters write these operators for neural networks and for distances.
QUANTIZABLE = ("Conv", "ConvTranspose", "Gemm", "MatMul")


# The reason and the next step for scores of `scores_of_pairs`.
PAIRS = "it has scores for pairs of classes, whose largest is not the answered class. Train the model with SVC(probability=True)"


def classical_operators(proto: Any) -> tuple[str, ...]:
    """Return the types of the `ai.onnx.ml` operators in a model; () for no model."""
    if proto is None:
        return ()
    return tuple(sorted({node.op_type for node in nodes_of(proto.graph) if node.domain == DOMAIN}))


def is_classical(proto: Any) -> bool:
    """Whether a model is from classical machine learning; False for no model.

    INT8 does not make such a model faster, and distorts distances between readings in different units.
    """
    return proto is not None and (proto.producer_name == PRODUCER or bool(classical_operators(proto)))


def is_float_only(proto: Any) -> bool:
    """Whether a model of classical machine learning has nothing to quantize."""
    return bool(classical_operators(proto)) and all(n.op_type not in QUANTIZABLE for n in nodes_of(proto.graph))


def scores_of_pairs(proto: Any) -> tuple[str, ...]:
    """Return the outputs with scores of a support vector machine without probabilities.

    Each score is for a pair of classes, so the largest one is not the score of the answered class: with two classes, it
    is always the score of the other class. For more classes, skl2onnx computes scores of the classes from them.
    """
    if proto is None:
        return ()
    names = set()
    for node in proto.graph.node:
        if node.op_type == "SVMClassifier" and attribute_of(node, "prob_a") is None:
            names.update(node.output[1:])
        elif node.op_type in ("Cast", "Identity", "ZipMap") and node.input[0] in names:
            names.update(node.output)
    return tuple(value.name for value in proto.graph.output if value.name in names)


def unwrap_maps(proto: Any) -> tuple[str, ...]:
    """Replace outputs that are lists of maps by tensors, and remove outputs that are text.

    By default, skl2onnx and onnxmltools append a `ZipMap` to classifiers, which makes a list of maps. The classes are
    often words, so a classifier also has an output of text. Returns a remark for each changed output.
    """
    from onnx import helper

    outputs = {value.name: value for value in proto.graph.output}
    remarks, classes = [], ""
    for node in proto.graph.node:
        if (node.domain, node.op_type) != (DOMAIN, "ZipMap") or node.output[0] not in outputs:
            continue
        value = outputs[node.output[0]]
        classes = classes or _class_names(node)
        node.op_type, node.domain = "Cast", ""
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", helper.TensorProto.FLOAT))  # this also converts FP64 to FP32
        value.CopyFrom(helper.make_tensor_value_info(value.name, helper.TensorProto.FLOAT, None))
        remarks.append(f"output {value.name!r}, a list of maps, is given as the tensor [N, classes] of its values")
    if remarks and not opset_of(proto):
        proto.opset_import.append(helper.make_opsetid("", IDENTITY_OPSET))
    return (*remarks, *_without_text(proto, classes))


def _without_text(proto: Any, classes: str) -> tuple[str, ...]:
    """Remove the text outputs of a classifier that has other outputs; return a remark for each."""
    from onnx import TensorProto

    texts = [value for value in proto.graph.output if value.type.tensor_type.elem_type == TensorProto.STRING]
    if not is_classical(proto) or len(texts) == len(proto.graph.output):
        return ()
    if texts and (pairs := scores_of_pairs(proto)):
        raise SourceInvalid(
            f"output {texts[0].name!r} is text, which EdgeRT does not support, and output {pairs[0]!r} does not tell the "
            f"class: {PAIRS}, or train the model on the numbers of the classes, and read its label"
        )
    for value in texts:
        proto.graph.output.remove(value)
    if texts:
        remove_unused(proto.graph)
    named = f", which are, in order: {classes}" if classes else ""
    return tuple(
        f"output {value.name!r} is text, and is removed: apps read the largest score (or the sign of a single score), and "
        f"--labels gives the names of the classes{named}"
        for value in texts
    )


def _class_names(zip_map: Any) -> str:
    names = next((attribute.strings for attribute in zip_map.attribute if attribute.name == "classlabels_strings"), ())
    shown = ", ".join(name.decode(errors="replace") for name in names[:CLASSES_SHOWN_MAX])
    return f"{shown}, ..." if len(names) > CLASSES_SHOWN_MAX else shown
