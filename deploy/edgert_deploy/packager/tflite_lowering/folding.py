"""Folds a model at one batch size: computes constants and shapes, and merges BatchNormalizations.

ONNX Runtime folds the model. ONNX Runtime accepts every model here, because sources/ has run each source once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
from onnx import helper, inliner, shape_inference

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert.printable import counted
from edgert_deploy.packager.sources.onnx_graph.axes import open_batch_axes
from edgert_deploy.packager.sources.onnx_graph.branches import optimized
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of, refill
from edgert_deploy.packager.sources.onnx_graph.opsets import IR_MAX
from edgert_deploy.packager.sources.onnx_graph.structure import ONNX_DOMAINS, opset_of

# The largest depth of functions inside functions.
ROUNDS_MAX = 20
# Operators that ONNX Runtime folds. The inliner does not replace them, even if ONNX defines them as functions. ONNX
# Runtime refuses the definition of AffineGrid.
FOLDED = frozenset({"AffineGrid", "Constant", "ConstantOfShape", "Range", "Shape", "Size"})
# Operators with quantized weights, as ONNX Runtime's tools for language models write them.
OF_QUANTIZED_WEIGHTS = frozenset({"MatMulNBits", "MatMulBnb4", "GatherBlockQuantized"})


def folded(model: onnx.ModelProto, batch: int, lowered: Collection[str]) -> onnx.ModelProto:
    """Return `model` folded at a fixed `batch`, with ONNX's functions inlined.

    An operator in `lowered` stays, even if ONNX defines it as a function. Raises OperatorUnsupported for operators
    outside of ONNX, and BuildFailed if ONNX Runtime cannot fold the model.
    """
    _refuse_foreign(model)
    fixed = _plain(_spelled_out(_at_batch(model, batch), lowered))
    try:
        result = optimized(fixed)
        if any(node.op_type == "Shape" for node in result.graph.node):
            # This Shape is from an ONNX function (such as GroupNormalization) that was inlined after the folding.
            result = optimized(result)
    except Exception as error:
        raise BuildFailed(
            f"ONNX Runtime could not fold the model for TFLite: {error}; check that the model runs in ONNX Runtime"
        ) from error
    return shape_inference.infer_shapes(result, data_prop=True)


def _refuse_foreign(model: onnx.ModelProto) -> None:
    foreign = [n for n in model.graph.node if n.domain not in ONNX_DOMAINS]
    if foreign:
        names: dict[str, list[str]] = {}
        for node in foreign:
            names.setdefault(f"{node.domain}:{node.op_type}", []).append(node.name)
        listed = ", ".join(
            f"{kind} ({counted(len(all_), 'node')}, such as {all_[0]!r})" for kind, all_ in names.items()
        )
        advice = "export the model without these operators"
        if any(node.op_type in OF_QUANTIZED_WEIGHTS for node in foreign):
            advice = "a tool quantized the weights of this model, so give the float model that the tool read"
        raise OperatorUnsupported(
            f"the model uses operators outside of ONNX, which TFLite does not have: {listed}; {advice}"
        )


def _at_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Return a copy with `batch` as the length of each input's open axis 0, and without all other shapes."""
    copy: onnx.ModelProto = copy_of(model)
    # ONNX Runtime may refuse newer file formats. The lowering supports none of their additions (types of 4 and 2 bits,
    # annotations for several devices).
    copy.ir_version = min(copy.ir_version, IR_MAX)
    for dim in open_batch_axes(copy):
        dim.dim_value = batch
    for value in copy.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    return copy


def _spelled_out(model: onnx.ModelProto, lowered: Collection[str]) -> onnx.ModelProto:
    """Inline ONNX's functions that are not in `lowered`; sources/ has inlined the model's own."""
    # The inliner needs an entry with the type of each input of a node, even for constants and absent inputs.
    constants = [(i.name, i.data_type, i.dims) for i in model.graph.initializer]
    for name, element, dims in [*constants, ("", onnx.TensorProto.FLOAT, [])]:
        model.graph.value_info.append(helper.make_tensor_value_info(name, element, dims))
    for _ in range(ROUNDS_MAX):
        _state_defaults(model)
        names = {n.op_type for n in model.graph.node if n.op_type not in lowered and _function(model, n) is not None}
        if not names - FOLDED:
            break
        chosen = [("", name) for name in names - FOLDED]
        try:
            model = inliner.inline_selected_functions(model, chosen, inline_schema_functions=True)
        except Exception:  # noqa: BLE001  # ONNX finds no dtype for a body: the lowering refuses its node by name
            break
    del model.graph.value_info[:]
    return model


def _state_defaults(model: onnx.ModelProto) -> None:
    """Write default attributes into the nodes that will be inlined, because ONNX's inliner omits them."""
    for node in model.graph.node:
        schema = _function(model, node)
        if schema is not None:
            present = {attribute.name for attribute in node.attribute}
            defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
            node.attribute.extend(value for name, value in defaults.items() if name not in present and value.name)


def _function(model: onnx.ModelProto, node: onnx.NodeProto) -> Any:
    """Return the schema of `node` if ONNX defines its operator as a function; otherwise None."""
    if node.domain not in ONNX_DOMAINS:
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(model), "")
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace CastLike by Cast, and Size by the product of a Shape, because ONNX Runtime can fold those."""
    elements: dict[str, int] = {}
    if any(node.op_type == "CastLike" for node in model.graph.node):
        model = shape_inference.infer_shapes(model)
        values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        elements = {value.name: value.type.tensor_type.elem_type for value in values}
        elements |= {initializer.name: initializer.data_type for initializer in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "CastLike" and elements.get(node.input[1]):
            node = helper.make_node("Cast", node.input[:1], node.output, node.name, to=elements[node.input[1]])
        elif node.op_type == "Size":
            shape = f"{node.output[0]}_shape"
            nodes.append(helper.make_node("Shape", node.input, [shape]))
            node = helper.make_node("ReduceProd", [shape], node.output, node.name, keepdims=0)
        nodes.append(node)
    refill(model.graph.node, nodes)
    return model


def static_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shape of each value whose lengths are all known."""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    tensors = {v.name: v.type.tensor_type for v in values if v.type.HasField("tensor_type")}
    known = {name: t.shape.dim for name, t in tensors.items() if t.HasField("shape")}
    return {
        n: tuple(d.dim_value for d in dims) for n, dims in known.items() if all(d.HasField("dim_value") for d in dims)
    }
