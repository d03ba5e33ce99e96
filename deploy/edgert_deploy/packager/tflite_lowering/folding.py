"""Folding: a model at one batch, with constants, shapes and BatchNormalization computed and functions inlined.

ONNX Runtime folds the model. If it has no kernel for a part that TFLite can take (a newer opset, a dtype), ONNX's
reference implementation computes the constants, and the rest stays as it is.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, inliner, numpy_helper, shape_inference

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.packager.tflite_lowering.batchwise import put_steps_first
from edgert_deploy.packager.tflite_lowering.pool_shapes import infer_shapes

ONNX_DOMAINS = ("", "ai.onnx")
# ONNX Runtime refuses newer file formats. Their additions (types of 4 and 2 bits, annotations for several devices)
# cannot be lowered anyway.
IR_VERSION_MAX = 10
# Each round of the reference folding computes one more level of shapes that depend on shapes.
ROUNDS_MAX = 20
# Operators that are computed at the build, whether ONNX defines them as functions or not.
FOLDED = frozenset({"Constant", "ConstantOfShape", "Range", "Shape", "Size"})
# The limit of a computed constant; and the operators whose results may be far larger than their inputs.
FOLDED_ELEMENTS_MAX = 50_000_000
GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Resize", "Tile"})
# Operators that are never computed here: their result differs each time.
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def has_open_batch(model: onnx.ModelProto) -> bool:
    first = [value.type.tensor_type.shape.dim[:1] for value in model.graph.input]
    return any(dims and not dims[0].HasField("dim_value") for dims in first)


def folded(model: onnx.ModelProto, batch: int, lowered: Collection[str]) -> onnx.ModelProto:
    """Return `model` at a fixed `batch`. ONNX's functions that are not `lowered` themselves are inlined.

    Raises OperatorUnsupported for operators outside of ONNX, and BuildFailed where nothing can fold the model.
    """
    _refuse_foreign(model)
    fixed = _plainly_cast(_spelled_out(_at_batch(model, batch), lowered))
    try:
        result = _optimized(fixed)
        if any(node.op_type == "Shape" for node in result.graph.node):
            # From an ONNX function (such as GroupNormalization) that was inlined after the folding.
            result = _optimized(result)
        if any(node.op_type in FOLDED for node in result.graph.node):
            result = _folded_by_reference(result)
        inlined = tuple(f"_inlfunc_{name}_" for name in lowered)
        if any(output.startswith(inlined) for node in result.graph.node for output in node.output):
            # ONNX Runtime knows the opset and has no kernel for the operator, so it wrote out what is lowered whole.
            result = _folded_by_reference(fixed)
    except Exception as error:  # noqa: BLE001  # ONNX Runtime's errors share no class of their own
        result = _without_onnx_runtime(fixed, error)
    return infer_shapes(result)


def _refuse_foreign(model: onnx.ModelProto) -> None:
    own = {function.domain for function in model.functions}
    foreign = [n for n in model.graph.node if n.domain not in ONNX_DOMAINS and n.domain not in own]
    if foreign:
        listed = ", ".join(f"{n.domain}:{n.op_type} (node {n.name!r})" for n in foreign)
        raise OperatorUnsupported(
            f"the model uses operators outside of ONNX, which TFLite does not have: {listed}; export it without them"
        )


def _at_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Return a copy with `batch` as axis 0 of each input that leaves it open, and without other noted shapes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = min(copy.ir_version, IR_VERSION_MAX)
    for value in copy.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    for value in copy.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    put_steps_first(copy)
    return copy


def _spelled_out(model: onnx.ModelProto, lowered: Collection[str]) -> onnx.ModelProto:
    """Return `model` with its own functions inlined, and those of ONNX that are not `lowered`."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    # The inliner needs the type of every input among the values, also of constants and of absent inputs.
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
        except Exception:  # noqa: BLE001  # ONNX finds no dtype for a body: its node is refused by name
            break
    del model.graph.value_info[:]
    return model


def _state_defaults(model: onnx.ModelProto) -> None:
    """Write the defaults of a function's attributes into its nodes: ONNX's inliner leaves them out."""
    for node in model.graph.node:
        schema = _function(model, node)
        if schema is not None:
            present = {attribute.name for attribute in node.attribute}
            defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
            node.attribute.extend(value for name, value in defaults.items() if name not in present and value.name)


def _function(model: onnx.ModelProto, node: onnx.NodeProto) -> Any:
    """Return the schema of an operator that ONNX defines by others, or None."""
    if node.domain not in ONNX_DOMAINS:
        return None
    version = next(opset.version for opset in model.opset_import if opset.domain in ONNX_DOMAINS)
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _plainly_cast(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace CastLike by Cast, so that a constant that is cast like a computed value is known."""
    if any(node.op_type == "CastLike" for node in model.graph.node):
        model = shape_inference.infer_shapes(model)
        values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        elements = {value.name: value.type.tensor_type.elem_type for value in values}
        elements |= {initializer.name: initializer.data_type for initializer in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "CastLike" and elements.get(node.input[1]):
                plain = helper.make_node("Cast", node.input[:1], node.output, node.name, to=elements[node.input[1]])
                node.CopyFrom(plain)
    return model


def _optimized(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory(prefix="edgert-tflite-") as folder:
        path = Path(folder) / "folded.onnx"
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(path)


# --- without ONNX Runtime


def _without_onnx_runtime(model: onnx.ModelProto, refusal: Exception) -> onnx.ModelProto:
    """Fold by ONNX's own tools. `refusal` is ONNX Runtime's error, which is reported where they fail too."""
    try:
        return _folded_by_reference(model)
    except Exception as error:
        raise BuildFailed(
            f"ONNX Runtime could not fold the model for TFLite: {refusal}; check that the model runs in ONNX Runtime"
        ) from error


def _folded_by_reference(model: onnx.ModelProto) -> onnx.ModelProto:
    for _ in range(ROUNDS_MAX):
        _forget_open_shapes(model)
        model = shape_inference.infer_shapes(model, data_prop=True)
        if not _fold_once(model):
            break
    _drop_unread(model)
    return model


def _forget_open_shapes(model: onnx.ModelProto) -> None:
    """Drop open shapes of an earlier round: inference keeps noted shapes, though constants are known by now."""
    known = static_shapes(model)
    kept = [value for value in model.graph.value_info if value.name in known]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def _fold_once(model: onnx.ModelProto) -> bool:
    """Replace nodes of constant inputs by their results, in place. Return whether there were any."""
    constants = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    shapes = static_shapes(model)
    left = []
    for node in model.graph.node:
        results = _results(model, node, constants, shapes)
        if results is None:
            left.append(node)
            continue
        for name, array in zip(node.output, results, strict=False):
            if name:
                constants[name] = array
                model.graph.initializer.append(numpy_helper.from_array(array, name))
    found = len(left) < len(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(left)
    return found


def _results(
    model: onnx.ModelProto, node: onnx.NodeProto, constants: dict[str, NDArray[Any]], shapes: dict[str, tuple[int, ...]]
) -> list[NDArray[Any]] | None:
    """Return the results of `node` where they are known before the model runs."""
    from onnx.reference import ReferenceEvaluator

    inputs = {name: constants.get(name) for name in node.input if name}
    if node.op_type in ("Shape", "Size") and node.input[0] in shapes:
        inputs = {node.input[0]: np.broadcast_to(np.float32(0), shapes[node.input[0]])}
    if any(array is None for array in inputs.values()) or node.op_type in RANDOM or _has_graph(node):
        return None
    if _elements(node, inputs, shapes) > FOLDED_ELEMENTS_MAX:
        return None
    untyped = [helper.make_empty_tensor_value_info(name) for name in inputs]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "constant", untyped, results)
    single = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=IR_VERSION_MAX)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant may be a division by zero that nothing reads
        return [np.asarray(array) for array in ReferenceEvaluator(single).run(None, inputs)]


def _elements(node: onnx.NodeProto, inputs: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> float:
    """Return the number of elements of a result that may be far larger than its inputs; else 0."""
    if node.op_type == "Range":
        start, limit, delta = (float(inputs[name].reshape(-1)[0]) for name in node.input)
        return abs(limit - start) / abs(delta) if delta else math.inf
    if node.op_type in GROWING:
        return math.prod(shapes[node.output[0]]) if node.output[0] in shapes else math.inf
    return 0


def _has_graph(node: onnx.NodeProto) -> bool:
    return any(attribute.type in (attribute.GRAPH, attribute.GRAPHS) for attribute in node.attribute)


def static_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shape of each value whose lengths are all known."""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    tensors = {v.name: v.type.tensor_type for v in values if v.type.HasField("tensor_type")}
    known = {name: t.shape.dim for name, t in tensors.items() if t.HasField("shape")}
    return {
        n: tuple(d.dim_value for d in dims) for n, dims in known.items() if all(d.HasField("dim_value") for d in dims)
    }


def _drop_unread(model: onnx.ModelProto) -> None:
    """Remove nodes and constants that nothing reads any more."""
    wanted = {value.name for value in model.graph.output}
    nodes = []
    for node in reversed(model.graph.node):
        if wanted & set(node.output) or _has_graph(node):
            nodes.append(node)
            wanted |= set(node.input)
    constants = [i for i in model.graph.initializer if i.name in wanted]
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
