"""Replaces each `If` whose condition is known at the build by the chosen branch.

Exporters write an `If` for each `if` of the program. Most of these nodes test a shape, so their conditions become
constants when the model's axes get lengths. ONNX Runtime's constant folding finds the values of such conditions. If
the batch is open, the folding runs at several batch sizes. A condition is known only if it has the same value at all of
these sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgert.engines.onnxruntime import sdk
from edgert_deploy.packager.sources.onnx_graph.axes import open_batch_axes, rename
from edgert_deploy.packager.sources.onnx_graph.nodes import Array, Constants, copy_of, graphs_inside, refill
from edgert_deploy.packager.sources.onnx_graph.structure import structure_of

CONTROL_FLOW = ("If", "Loop", "Scan")
END = "/edgert_constant"
BATCHES = (1, 2, 3, 32)
ROUNDS_MAX = 20  # each round inlines one level of branches inside branches


def control_flow(proto: Any) -> tuple[str, ...]:
    """Return texts such as `Loop node 'name'` for the `If`, `Loop` and `Scan` nodes; () for no model."""
    nodes = () if proto is None else proto.graph.node
    return tuple(
        f"{node.op_type} node {(node.name or node.output[0])!r}" for node in nodes if node.op_type in CONTROL_FLOW
    )


def inline_known_branches(proto: Any) -> bool:
    """Replace each `If` with a known condition by the chosen branch; return whether there was any."""
    changed = False
    for _ in range(ROUNDS_MAX):
        conditions = {node.input[0] for node in proto.graph.node if node.op_type == "If"}
        if not conditions or not (known := _known_conditions(proto, sorted(conditions))):
            break
        nodes = []
        for node in proto.graph.node:
            inlined = node.op_type == "If" and node.input[0] in known
            nodes += _branch(proto.graph, node, known[node.input[0]]) if inlined else [node]
        refill(proto.graph.node, nodes)
        changed = True
    if changed:
        remove_unused(proto.graph)
    return changed


def drop_empty_outputs(proto: Any) -> list[str]:
    """Remove the outputs that are constants without elements; return their names.

    Optimum merges two models of a decoder, for its first step and for its later steps. After the choice of the later
    steps, some outputs are such constants.
    """
    constants = Constants(proto)
    origin = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "Identity"}
    empty = []
    for value in proto.graph.output:
        name = value.name
        while name in origin:
            name = origin[name]
        if (array := constants.get(name)) is not None and not array.size:
            empty.append(value.name)
    if len(empty) in (0, len(proto.graph.output)):
        return []
    refill(proto.graph.output, (value for value in proto.graph.output if value.name not in empty))
    remove_unused(proto.graph)
    return empty


def flatten_conditions(proto: Any) -> bool:
    """Reshape conditions of `If` to one axis, because OpenVINO refuses [1, 1]; return whether any changed."""
    import numpy as np
    from onnx import helper, numpy_helper, shape_inference

    if not any(node.op_type == "If" for node in proto.graph.node):
        return False
    inferred = shape_inference.infer_shapes(structure_of(proto)).graph.value_info
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in inferred}
    nodes, flat = [], {}
    for node in proto.graph.node:
        if node.op_type == "If" and ranks.get(name := node.input[0], 0) > 1:
            if name not in flat:
                flat[name] = f"{name}/edgert_flat"
                proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), f"{name}/edgert_one"))
                nodes.append(helper.make_node("Reshape", [name, f"{name}/edgert_one"], [flat[name]], flat[name]))
            node.input[0] = flat[name]
        nodes.append(node)
    refill(proto.graph.node, nodes)
    return bool(flat)


def _known_conditions(proto: Any, conditions: Iterable[str]) -> dict[str, bool]:
    """Return the value of each condition that depends only on constants and fixed lengths."""
    batches = BATCHES if any(open_batch_axes(proto)) else (1,)
    first, *others = (folded_constants(proto, conditions, batch, "BOOL") for batch in batches)
    values = {name: bool(array) for name, array in first.items()}
    return {name: value for name, value in values.items() if all(other.get(name) == value for other in others)}


def folded_constants(proto: Any, names: Iterable[str], batch: int, datatype: str) -> dict[str, Array]:
    """Return the values in `names` that are constants at `batch`. All of them have ONNX's type `datatype`."""
    import onnx
    from onnx import helper, numpy_helper

    copy = copy_of(proto)
    for dim in open_batch_axes(copy):
        dim.dim_value = batch
    del copy.graph.value_info[:]
    del copy.graph.output[:]
    # The folding does not fold a node that makes an output. So an Identity of each value becomes an output.
    for name in names:
        copy.graph.node.append(helper.make_node("Identity", [name], [f"{name}{END}"]))
        kind = getattr(onnx.TensorProto, datatype)
        copy.graph.output.append(helper.make_tensor_value_info(f"{name}{END}", kind, None))
    remove_unused(copy.graph)  # else ONNX Runtime 1.32 crashes while it folds the branches of Silero VAD 5
    try:
        folded = optimized(copy)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - native code raises any class; the code that runs the model reports it better
        return {}
    constants = {tensor.name: tensor for tensor in folded.graph.initializer}
    aliases = {node.output[0]: node.input[0] for node in folded.graph.node if node.op_type == "Identity"}
    ends = {name: aliases.get(f"{name}{END}", f"{name}{END}") for name in names}
    return {name: numpy_helper.to_array(constants[end]) for name, end in ends.items() if end in constants}


def optimized(proto: Any) -> Any:
    """Return the model after ONNX Runtime has folded its constants.

    Two of its optimizations are off, because their results may be wrong for another batch. NoopElimination removes an
    addition of 0 and a multiplication by 1: at batch 1, the numbers of a batch's items are [0]. TransposeOptimizer
    makes a Transpose of a Reshape that moves only axes of length 1.
    """
    import onnx

    runtime = sdk()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory(prefix="edgert-folding-") as folder:
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        runtime.InferenceSession(
            proto.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["NoopElimination", "TransposeOptimizer"],
        )
        return onnx.load(options.optimized_model_filepath)


def _branch(graph: Any, node: Any, condition: bool) -> list[Any]:
    """Return the chosen branch's nodes, with unique names. Its constants become constants of `graph`."""
    from onnx import helper

    chosen = "then_branch" if condition else "else_branch"
    branch = copy_of(next(attribute.g for attribute in node.attribute if attribute.name == chosen))
    prefix = f"{node.output[0]}/"
    own = [name for inner in branch.node for name in inner.output if name] + [t.name for t in branch.initializer]
    results = [value.name for value in branch.output]
    for name in own:
        rename(branch, name, prefix + name)
    for inner in branch.node:
        inner.output[:] = [prefix + name if name else name for name in inner.output]
        inner.name = inner.name and prefix + inner.name
    for tensor in branch.initializer:
        tensor.name = prefix + tensor.name
    graph.initializer.extend(branch.initializer)
    own_names = set(own)
    ends = [
        helper.make_node(
            "Identity", [prefix + inner if inner in own_names else inner], [outer], name=f"{prefix}{outer}"
        )
        for inner, outer in zip(results, node.output, strict=True)
        if outer
    ]
    return [*branch.node, *ends]


def remove_unused(graph: Any) -> None:
    """Remove the nodes and constants that no output needs, because a runtime would compute them."""
    needed = {value.name for value in graph.output}
    used_nodes = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            used_nodes.append(node)
            needed.update(node.input)
            for inside in graphs_inside(node):
                needed.update(name for one in inside.node for name in one.input)
                needed.update(value.name for value in inside.output)
    needed.update(value.name for value in graph.input)  # an input may have a default among the initializers
    refill(graph.node, reversed(used_nodes))
    refill(graph.initializer, (tensor for tensor in graph.initializer if tensor.name in needed))
