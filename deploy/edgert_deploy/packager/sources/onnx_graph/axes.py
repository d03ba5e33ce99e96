"""Give the open axes of an ONNX model their lengths and bring its batch axes to the front.

EdgeRT's artifacts have one open axis, the batch, which is axis 0 of every input and output. Trained models often leave
more axes open (height and width, or text length). The user gives the lengths of these axes. Recurrent models keep a
state `[layers, N, H]`, in which the batch is not axis 0. Such an input or output gets a Transpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of, graphs_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of

IR_OF_WEIGHTS_ALONE = 4  # the first IR in which weights need not be inputs
OPSET_OF_AXES = 13  # the first opset in which Unsqueeze reads its axes from an input
# A node that is added at an input or output connects it to an inner value, whose name has this suffix.
SUFFIX = "/edgert_batch_inside"


def add_batches(proto: Any, shapes: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Add a batch axis of 1 to every input if `shapes` gives one; return a remark for each.

    `shapes` (name -> lengths) gives it with one axis more than the model's input has, a 1 in front. Examples of models
    without a batch are graphs of atoms, clouds of points, and detectors that take one image [3, H, W].
    """
    values = [value for value in model_inputs(proto) if value.type.tensor_type.shape.dim]
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
    # Two ones in front are a mistake: axis 0 of the model is the batch, too.
    if not any(len(given) == ranks.get(name, -1) + 1 and given[0] == 1 != given[1] for name, given in shapes.items()):
        return ()
    remarks = []
    for value in values:
        dims = value.type.tensor_type.shape.dim
        before, inner = described(dims), str(value.name + SUFFIX)
        rename(proto.graph, value.name, inner)
        refill(dims, [copy_of(dims[0]), *dims])
        _set(dims[0], 1)
        refill(proto.graph.node, [_on_batch_axis(proto, "Squeeze", value.name, inner, inner), *proto.graph.node])
        remarks.append(f"input {value.name!r} {before} is taken as {described(dims)}: with a batch axis added")
    forget_shapes(proto)
    return tuple(remarks)


def set_lengths(proto: Any, shapes: Mapping[str, Sequence[float]]) -> tuple[bool, tuple[str, ...]]:
    """Set the axes of the inputs in `shapes` (name -> lengths), and other inputs' axes of the same names.

    An input without axes is one number, such as a sampling rate. Its given value becomes a constant of the model. The
    given value of a BOOL, true or false, becomes a constant, too. For example, Optimum's input `use_cache_branch`
    chooses a branch.

    If the model leaves the batch open, the batch stays open, and its given length must be 1. A given length may also
    replace a fixed length. Convolutions accept any length. The run on a sample shows whether the other layers accept
    the new length, too.

    Returns whether anything changed, and a remark for each input with a replaced length. Raises SourceInvalid if a
    name, a rank or a value does not fit the model.
    """
    inputs = {value.name: value for value in model_inputs(proto)}
    named: dict[str, int] = {}
    remarks = []
    changed = _clear_placeholders(proto)
    batches = _batch_names(proto)
    for name, given in shapes.items():
        if name not in inputs:
            raise SourceInvalid(f"--input {name}: the model has no such input; it has {', '.join(map(repr, inputs))}")
        dims = inputs[name].type.tensor_type.shape.dim
        if isinstance(given[0], bool) or (not dims and len(given) == 1):
            _make_constant(proto, inputs.pop(name), given[0])
            changed = True
            continue
        lengths = [int(n) for n in given]
        if lengths != list(given) or min(lengths) < 0:
            raise SourceInvalid(f"--input {name}={_text(given)}: the lengths of axes are whole numbers of 1 or more")
        if len(dims) != len(lengths):
            raise SourceInvalid(
                f"--input {name}={_text(lengths)} gives {len(lengths)} axes, but the model's input has {len(dims)}: {described(dims)}"
            )
        before = described(dims)
        lengths_by_name, replaced = _set_axes(name, dims, lengths, batches)
        named |= lengths_by_name
        changed |= described(dims) != before
        if replaced:
            remarks.append(f"input {name!r} {before} is taken as {described(dims)}, as --input says")
            forget_outputs(proto)
    for value in inputs.values():
        for dim in list(value.type.tensor_type.shape.dim)[1:]:
            if is_open(dim) and dim.dim_param in named:
                _set(dim, named[dim.dim_param])
                changed = True
    if changed:
        forget_shapes(proto)
    return changed, tuple(remarks)


def option_for(name: str, dims: Any) -> str:
    """Return the option that sets the axes of the input `name`, such as `--input images=1,3,HEIGHT,WIDTH`."""
    words = []
    for axis, dim in enumerate(dims):
        letters = "".join(c for c in dim.dim_param.upper() if c.isalnum())
        words.append("1" if axis == 0 else letters or f"LENGTH{axis}" if is_open(dim) else str(dim.dim_value))
    return f"--input {name}={','.join(words)}"


def axis_option(name: str, dims: Any, axis: int) -> str:
    """Return an example of `--buckets` for `axis`: `tokens=32,64,128`, or `ids:1=...` for an unnamed axis."""
    param = dims[axis].dim_param
    return f"{f'{name}:{axis}' if param in ('', '?') else param}=32,64,128"


def described(dims: Any) -> str:
    """Return the axes as text with their lengths or names, such as `[batch, 3, ?, ?]`."""
    return "[" + ", ".join((dim.dim_param or "?") if is_open(dim) else str(dim.dim_value) for dim in dims) + "]"


def move_input_batches(proto: Any) -> tuple[str, ...]:
    """Bring the batch axis of inputs such as `[layers, N, H]` to the front; return a remark for each.

    An input whose axis 0 is open does not change. For any other input, these rules are tried in order until one of them
    finds the batch. If no rule finds it, the input does not change.

    1. The batch is the open axis with the same name as the open axis 0 of another input. If axis 0 of every input has a
       fixed length above 1, the names come from the open axes 0 of the outputs instead.
    2. If these axes have no names, the batch is the only open axis of the input, if this axis has no name, either.
    3. If axis 0 of some input is open or has length 1, the batch is the first axis of length 1.
    """
    inputs, remarks = list(model_inputs(proto)), []
    firsts = [value.type.tensor_type.shape.dim[0] for value in inputs if value.type.tensor_type.shape.dim]
    batches = _batch_names(proto)
    open_batch = bool(batches) or any(is_open(dim) for dim in firsts)
    batch_first = any(is_open(dim) or dim.dim_value == 1 for dim in firsts)
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        if not dims or is_open(dims[0]):
            continue
        named = [i for i in range(1, len(dims)) if open_batch and _may_be_batch(dims, i, batches)]
        ones = [i for i, dim in enumerate(dims) if batch_first and dim.dim_value == 1]
        axis = (named or ones or [0])[0]
        if axis:
            before = described(dims)
            _move_input(proto, value, axis)
            remarks.append(
                f"input {value.name!r} {before} is taken as {described(value.type.tensor_type.shape.dim)}: the batch first"
            )
    if remarks:
        forget_shapes(proto)
    return tuple(remarks)


def move_output_batches(proto: Any, one: Sequence[tuple[int, ...]], two: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Bring the batch axis of each output to the front; return a remark for each changed output.

    `one` has the shapes of the outputs for one sample, and `two` has their shapes for two samples. If the batch is
    fixed to 1, `two` is equal to `one`. Then an output without an axis of length 1 gets such an axis as the batch.
    """
    remarks = []
    for value, a, b in zip(list(proto.graph.output), one, two, strict=True):
        if tuple(a) == tuple(b) and 1 not in a:
            _add_batch(proto, value, len(a))
            remarks.append(f"output {value.name!r} {list(a)} is given as {[1, *a]}: with the batch added")
            continue
        if len(a) != len(b):
            continue
        grew = [i for i in range(len(a)) if (a[i], b[i]) == (1, 2)]
        axis = grew[0] if len(grew) == 1 else 0
        if tuple(a) == tuple(b) and a[0] != 1:  # the batch is fixed, so the first axis of length 1 is the batch
            axis = a.index(1)
        if axis:
            _move_output(proto, value, axis, len(a))
            was = ["N" if i in grew else str(length) for i, length in enumerate(a)]
            now = [was[axis], *was[:axis], *was[axis + 1 :]]
            remarks.append(f"output {value.name!r} [{', '.join(was)}] is given as [{', '.join(now)}]: the batch first")
    return tuple(remarks)


def forget_shapes(proto: Any) -> None:
    """Remove the shapes of the graph's inner values, because they may contradict the inputs' new lengths."""
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()


def fixed_batches(proto: Any) -> list[str]:
    """Return the inputs whose batch is fixed to 1, if other inputs leave the batch open."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model_inputs(proto)}
    firsts = {name: dims[0] for name, dims in shapes.items() if dims}
    ones = [name for name, dim in firsts.items() if not is_open(dim) and dim.dim_value == 1]
    return ones if any(is_open(dim) for dim in firsts.values()) else []


def fix_batch(proto: Any) -> bool:
    """Set an open batch to 1; return whether the batch was open."""
    firsts = list(open_batch_axes(proto))
    for dim in firsts:
        _set(dim, 1)
    if firsts:
        forget_shapes(proto)
    return bool(firsts)


def forget_outputs(proto: Any) -> None:
    """Clear the lengths of the outputs' axes, because they may contradict new lengths of fixed axes."""
    for value in proto.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()


def open_batch_axes(proto: Any) -> Iterator[Any]:
    """Yield axis 0 of each input whose axis 0 is open."""
    firsts = (value.type.tensor_type.shape.dim[:1] for value in model_inputs(proto))
    return (dim for dims in firsts for dim in dims if is_open(dim))


def rename(graph: Any, old: str, new: str) -> None:
    """Make every node, including the nodes inside other nodes, read `new` instead of `old`."""
    for node in nodes_of(graph):
        node.input[:] = [new if name == old else name for name in node.input]


def model_inputs(proto: Any) -> Iterator[Any]:
    """Yield the inputs that are not weights."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return (value for value in proto.graph.input if value.name not in weights)


def drop_weight_inputs(proto: Any) -> bool:
    """Remove the weights that models in IR 3 list as inputs; return whether there were any.

    A tool treats a weight among the inputs as a default that a caller may replace. So the tool would fold nothing, or
    would make a folded value an input.
    """
    inputs = list(model_inputs(proto))
    if len(inputs) == len(proto.graph.input):
        return False
    refill(proto.graph.input, inputs)
    proto.ir_version = max(proto.ir_version, IR_OF_WEIGHTS_ALONE)
    return True


def drop_unread_inputs(proto: Any) -> list[str]:
    """Remove the inputs that no operator reads; return their names.

    Some engines drop such inputs, and then refuse values for them. If no operator reads any input, none is removed.
    """
    read = {name for node in nodes_of(proto.graph) for name in node.input}
    read |= {value.name for graph in graphs_of(proto.graph) for value in graph.output}
    unread = [value.name for value in proto.graph.input if value.name not in read]
    if len(unread) == len(proto.graph.input):
        return []
    refill(proto.graph.input, (value for value in proto.graph.input if value.name in read))
    return unread


def is_open(dim: Any) -> bool:
    """Whether the model leaves the length of an axis open."""
    return not (dim.HasField("dim_value") and dim.dim_value > 0)


def _batch_names(proto: Any) -> set[str]:
    """Return the names that the batch has: the names of the open axes 0 of the inputs.

    If axis 0 of every input has a fixed length above 1, return the names of the open axes 0 of the outputs.
    """
    firsts = [dim for value in model_inputs(proto) for dim in value.type.tensor_type.shape.dim[:1]]
    # The batch is not axis 0 of any input. Example: [steps, N, features], the default of PyTorch's recurrent layers.
    if all(dim.dim_value > 1 for dim in firsts):
        firsts = [dim for value in proto.graph.output for dim in value.type.tensor_type.shape.dim[:1]]
    return {dim.dim_param for dim in firsts if is_open(dim) and dim.dim_param}


def _may_be_batch(dims: Any, axis: int, batches: set[str]) -> bool:
    """Whether axis 0 is fixed, and the open `axis` has the batch's name or is the only open axis."""
    if is_open(dims[0]) or not is_open(dims[axis]):
        return False
    if batches:
        return dims[axis].dim_param in batches
    unnamed = dims[axis].dim_param in ("", "?")
    return unnamed and dims[0].dim_value > 1 and sum(is_open(dim) for dim in dims) == 1


def _set_axes(name: str, dims: Any, lengths: Sequence[int], batches: set[str]) -> tuple[dict[str, int], bool]:
    """Set the axes `dims` of the input `name`, except the batch, to `lengths`.

    Returns the lengths of open axes (name of the axis -> length), and whether `lengths` replaced a fixed length. Raises
    SourceInvalid if the given length of the batch is not 1.
    """
    named, replaced = dict[str, int](), False
    for axis, (dim, length) in enumerate(zip(dims, lengths, strict=True)):
        if is_open(dim) and (axis == 0 or _may_be_batch(dims, axis, batches)):
            if length != 1:
                raise SourceInvalid(
                    f"--input {name}={_text(lengths)}: axis {axis} is the batch, which stays open; give it as 1{_without_batch(axis, name, lengths)}"
                )
        elif is_open(dim):
            if dim.dim_param not in ("", "?"):
                named[dim.dim_param] = length
            _set(dim, length)
        elif dim.dim_value != length:
            _set(dim, length)
            replaced = True
    return named, replaced


def _without_batch(axis: int, name: str, lengths: Sequence[int]) -> str:
    """Return the advice for a model whose axis 0 is not the batch."""
    if axis:
        return ""
    return f". If the model has no batch, put a batch axis of 1 in front: --input {name}=1,{_text(lengths)}"


def _make_constant(proto: Any, value: Any, number: float) -> None:
    import numpy as np
    from onnx import helper, numpy_helper

    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    dims = value.type.tensor_type.shape.dim
    if isinstance(number, bool):
        if dtype.kind != "b" or any(is_open(dim) for dim in dims):
            raise SourceInvalid(
                f"--input {value.name}={str(number).lower()}: the input is {dtype} {described(dims)}; only a BOOL with fixed axes "
                "can become a constant"
            )
    elif dtype.kind != "f" and (number != int(number) or not (dtype.kind == "i" or number >= 0)):
        raise SourceInvalid(f"--input {value.name}={number:g}: the input is {dtype}, which does not hold this number")
    constant = np.full([dim.dim_value for dim in dims], number, dtype)
    proto.graph.initializer.append(numpy_helper.from_array(constant, value.name))
    proto.graph.input.remove(value)


def _move_input(proto: Any, value: Any, axis: int) -> None:
    from onnx import helper

    inner, dims = value.name + SUFFIX, list(value.type.tensor_type.shape.dim)
    rename(proto.graph, value.name, inner)
    refill(value.type.tensor_type.shape.dim, [dims[axis], *dims[:axis], *dims[axis + 1 :]])
    perm = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
    node = helper.make_node("Transpose", [value.name], [inner], name=inner, perm=perm)
    refill(proto.graph.node, [node, *proto.graph.node])


def _move_output(proto: Any, value: Any, axis: int, rank: int) -> None:
    from onnx import helper

    inner = _inner(proto, value, rank)
    perm = [axis, *(i for i in range(rank) if i != axis)]
    proto.graph.node.append(helper.make_node("Transpose", [inner], [value.name], name=inner, perm=perm))


def _add_batch(proto: Any, value: Any, rank: int) -> None:
    inner = _inner(proto, value, rank + 1)
    proto.graph.node.append(_on_batch_axis(proto, "Unsqueeze", inner, value.name, inner))


def _on_batch_axis(proto: Any, operator: str, source: str, result: str, name: str) -> Any:
    """Return a Squeeze or an Unsqueeze of axis 0, named `name`."""
    import numpy as np
    from onnx import helper, numpy_helper

    if opset_of(proto) < OPSET_OF_AXES:
        return helper.make_node(operator, [source], [result], name=name, axes=[0])
    axes = f"{name}/axes"
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), axes))
    return helper.make_node(operator, [source, axes], [result], name=name)


def _inner(proto: Any, value: Any, rank: int) -> str:
    """Rename the value that becomes the output `value`, with `rank` open axes; return the new name."""
    inner = str(value.name + SUFFIX)
    for node in proto.graph.node:
        node.output[:] = [inner if name == value.name else name for name in node.output]
    rename(proto.graph, value.name, inner)
    del value.type.tensor_type.shape.dim[:]
    for _ in range(rank):
        value.type.tensor_type.shape.dim.add()
    return inner


def _clear_placeholders(proto: Any) -> bool:
    """Clear the lengths -1 and 0, which some exporters write for an open axis, because tools misread them."""
    cleared = False
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:
                dim.Clear()
                cleared = True
    return cleared


def _set(dim: Any, length: int) -> None:
    dim.Clear()
    dim.dim_value = length


def _text(lengths: Sequence[float]) -> str:
    return ",".join(map(str, lengths))
