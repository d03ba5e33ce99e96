"""Folds preprocessing into the model: scale, mean, std, layout and colour become the first layers.

This changes the contract. The input becomes the UINT8 frame, in its own layout and colour order, and a device only
decodes and resizes. For OpenVINO, a PrePostProcessor makes these layers. For ONNX Runtime and TensorRT, this module
adds ONNX operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgert.bundle.rules import Preprocess
from edgert.errors import ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_graph.axes import rename
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of, refill
from edgert_deploy.packager.sources.source_model import HEAD, Fold, SourceModel

_OMIT_IT = "omit the option, and devices preprocess as the manifest describes"


def folded(source: SourceModel, rule: Preprocess) -> tuple[SourceModel, Preprocess]:
    """Return the model whose input is the frame, and the rule for the steps that stay on devices.

    Raises ConfigInvalid.
    """
    spec = next(spec for spec in source.inputs if spec.name == rule.input)
    if source.kind != "onnx" or len(spec.shape) != 4 or spec.datatype != "FP32":
        raise ConfigInvalid(
            f"--fold-preprocess needs an ONNX model with an FP32 input of 4 axes; input {spec.name!r} of this {source.kind} "
            f"model is {spec.datatype} {list(spec.shape)}: {_OMIT_IT}"
        )
    if not _is_plain(source.proto, spec.name):
        raise ConfigInvalid(
            f"--fold-preprocess cannot be used: no operator of the model reads input {spec.name!r}, or an operator's name "
            f"begins with {HEAD!r}: {_OMIT_IT}"
        )
    layout = rule.model_layout if rule.layout == "model" else rule.layout
    channels, height, width = (
        spec.item_shape if rule.model_layout == "nchw" else (spec.shape[3], spec.shape[1], spec.shape[2])
    )
    item = (channels, height, width) if layout == "nchw" else (height, width, channels)
    frame = TensorSpec(spec.name, "UINT8", (spec.shape[0], *item))
    inputs = tuple(frame if tensor is spec else tensor for tensor in source.inputs)
    colour = rule.colour if rule.frame_colour == "model" else rule.frame_colour
    turns = colour != rule.colour
    fold = Fold(source.proto, spec.name, layout, rule.model_layout, turns, rule.scale, rule.mean, rule.std)
    rest = Preprocess(
        spec.name, layout="model", model_layout=layout, colour=colour, resize=rule.resize, decode=rule.decode
    )
    return replace(source, proto=_with_head(source.proto, frame, fold), inputs=inputs, fold=fold), rest


def _is_plain(proto: Any, name: str) -> bool:
    return all(not node.name.startswith(HEAD) for node in proto.graph.node) and any(
        name in node.input for node in proto.graph.node
    )


def _with_head(proto: Any, frame: TensorSpec, fold: Fold) -> Any:
    """Return the model with Cast, Transpose, Gather, Mul and Add in front. TensorRT needs the Cast first.

    Transpose and Gather are added only if the layout or the colour order differs.
    """
    from onnx import TensorProto, helper, numpy_helper

    copy = copy_of(proto)
    graph = copy.graph
    inner = f"{HEAD}{fold.input}"
    rename(graph, fold.input, inner)
    value = next(value for value in graph.input if value.name == fold.input)
    batch = value.type.tensor_type.shape.dim[0]
    dims = [batch.dim_param or "N" if frame.shape[0] == -1 else 1, *frame.item_shape]
    value.CopyFrom(helper.make_tensor_value_info(fold.input, TensorProto.UINT8, dims))
    factor, shift = fold.factor_and_shift()
    trailing = (1, 1) if fold.model_layout == "nchw" else ()
    constants = {f"{HEAD}factor": factor.reshape(-1, *trailing), f"{HEAD}shift": shift.reshape(-1, *trailing)}
    graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), name) for name, a in constants.items())
    steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [], {"to": TensorProto.FLOAT})]
    if fold.layout != fold.model_layout:
        steps.append(("Transpose", [], {"perm": [0, 3, 1, 2] if fold.layout == "nhwc" else [0, 2, 3, 1]}))
    if fold.flips:
        steps.append(("Gather", [f"{HEAD}order"], {"axis": 1 if fold.model_layout == "nchw" else 3}))
        graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), f"{HEAD}order"))
    steps += [("Mul", [f"{HEAD}factor"], {}), ("Add", [f"{HEAD}shift"], {})]
    nodes, last = [], fold.input
    for i, (op, more, attributes) in enumerate(steps):
        out = inner if i == len(steps) - 1 else f"{HEAD}{op.lower()}_out"
        nodes.append(helper.make_node(op, [last, *more], [out], name=f"{HEAD}{op.lower()}", **attributes))
        last = out
    refill(graph.node, [*nodes, *graph.node])
    del graph.value_info[:]
    return copy
