"""The inputs and outputs of a model as specs. Refuses tensors that EdgeRT does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from edgert.errors import SourceInvalid
from edgert.tensors import DATATYPES, MAX_RANK, TensorSpec
from edgert_deploy.packager.sources.onnx_graph.axes import axis_option, described, is_open, model_inputs, option_for

NAME_LENGTH_MAX = 255
RUN_BYTES_MAX = 2**33  # the limit for each input of a run


class OneSampleOnly(SourceInvalid):
    """The model leaves its batch open, but does not answer each sample of a batch of two alone."""


def input_specs(proto: Any, open_axes: Collection[tuple[str, int]] = ()) -> tuple[TensorSpec, ...]:
    """Return the inputs that are not weights.

    Besides the batch, only the axes in `open_axes` (name of the input, number of the axis) may be open.
    Raises SourceInvalid.
    """
    values = tuple(model_inputs(proto))
    datatypes = [_datatype(value) for value in values]
    _check_open_axes(values, open_axes)
    specs = tuple(
        TensorSpec(value.name, datatype, _shape(value.name, value.type.tensor_type.shape.dim))
        for value, datatype in zip(values, datatypes, strict=True)
    )
    if not specs:
        raise SourceInvalid("the model has no input; export it so that the data is an input, not a constant")
    check_batch_axes(specs)
    return specs


def check_value(name: str, dtype: str) -> None:
    """Raise SourceInvalid for an input whose name or dtype a bundle cannot hold."""
    if not name or len(name) > NAME_LENGTH_MAX:
        raise SourceInvalid(
            f"an input of the model has no name, or a name of more than {NAME_LENGTH_MAX} letters; rename it"
        )
    if dtype == "text":
        raise SourceInvalid(
            f"input {name!r} is text; EdgeRT supports only numbers: encode categories as numbers before the model, and tokens of "
            "text as docs/text.md describes"
        )
    if dtype not in DATATYPES:
        raise SourceInvalid(
            f"input {name!r} has element type {dtype}; EdgeRT supports {', '.join(DATATYPES)}: export the model with an input "
            "of one of these types, and a Cast after it if necessary"
        )


def check_run_size(spec: TensorSpec, shape: list[int]) -> None:
    """Raise SourceInvalid for an input of `shape` that is too large to run."""
    if int(np.prod(shape, dtype=object)) * spec.dtype.itemsize > RUN_BYTES_MAX:
        raise SourceInvalid(
            f"input {spec.name!r} of shape {shape} is larger than {RUN_BYTES_MAX} bytes; give smaller lengths"
        )


def check_batch_axes(specs: tuple[TensorSpec, ...]) -> None:
    """Raise SourceInvalid if some of `specs` leave the batch open and others do not."""
    open_batch = {spec.name: spec.shape[0] == -1 for spec in specs}
    if len(set(open_batch.values())) > 1:
        raise SourceInvalid(
            f"some inputs leave the batch axis open ({_names(n for n, o in open_batch.items() if o)}) and others do not "
            f"({_names(n for n, o in open_batch.items() if not o)}); export all of them with an open axis 0, or all with axis 0 of length 1"
        )


def output_spec(name: str, datatype: str, shapes: list[tuple[int, ...]], inputs: tuple[TensorSpec, ...]) -> TensorSpec:
    """Return the spec of an output from its shapes for one sample and (if the batch is open) two samples."""
    if datatype == "object":
        raise SourceInvalid(
            f"output {name!r} is text; EdgeRT supports only numbers: train the model on the numbers of the classes, and give "
            "their names with --labels"
        )
    if datatype not in DATATYPES:
        raise SourceInvalid(
            f"output {name!r} is of type {datatype!r}; EdgeRT supports {', '.join(DATATYPES)}: omit the output from the export, "
            "or end it with a tensor of one of these types"
        )
    first, last = shapes[0], shapes[-1]
    if 0 in first[1:]:
        raise SourceInvalid(
            f"output {name!r} has shape {list(first)} for a sample of zeros: it is empty, or its length depends on the values; "
            "omit it from the export, or export the model with a fixed length"
        )
    if inputs[0].shape[0] != -1:
        if not first or first[0] != 1:
            raise SourceInvalid(
                f"output {name!r} has shape {list(first)}; axis 0 must be the batch, of length 1 like axis 0 of the inputs"
            )
        return TensorSpec(name, DATATYPES[datatype], first)
    if not first or (first[0], last[0]) != (1, 2) or first[1:] != last[1:]:
        raise OneSampleOnly(
            f"output {name!r} has shape {list(first)} for one sample and {list(last)} for two; axis 0 of every output must "
            "count the samples: change that output, or export the model with batch fixed to 1"
        )
    return TensorSpec(name, DATATYPES[datatype], (-1, *first[1:]))


def _datatype(value: Any) -> str:
    from onnx.helper import tensor_dtype_to_np_dtype

    if not value.type.HasField("tensor_type"):
        raise SourceInvalid(f"input {value.name!r} is not a tensor; only tensors can be inputs")
    tensor = value.type.tensor_type
    try:
        dtype = tensor_dtype_to_np_dtype(tensor.elem_type).name
    except KeyError:
        dtype = f"number {tensor.elem_type}"
    check_value(value.name, "text" if dtype == "object" else dtype)
    if not tensor.HasField("shape"):
        raise SourceInvalid(f"input {value.name!r} has no shape; export the model with its input shape")
    return DATATYPES[dtype]


def _check_open_axes(values: Sequence[Any], open_axes: Collection[tuple[str, int]]) -> None:
    """Raise SourceInvalid if other axes than the batch and `open_axes` are open.

    The message names all of these axes, and also the inputs without axes, so that one command can set everything.
    """
    found, options, keys, clash = list[str](), list[str](), list[str](), list[str]()
    for value in values:
        dims = value.type.tensor_type.shape.dim
        axes = [i for i in range(1, len(dims)) if is_open(dims[i]) and (value.name, i) not in open_axes]
        if not axes:
            continue
        found.append(
            f"{'axis' if len(axes) == 1 else 'axes'} {_joined(map(str, axes))} of input {value.name!r} {described(dims)}"
        )
        own = [axis_option(value.name, dims, axis) for axis in axes]
        if not set(own) <= set(keys):  # --input also sets the axes of the same name in other inputs
            options.append(option_for(value.name, dims))
        keys += own
        clash += [value.name] if any(value.name == name for name, _ in open_axes) else []
    if not found:
        return
    are = "is" if len(keys) == 1 else "are"
    if clash:
        raise SourceInvalid(
            f"{_joined(found)} {are} open beside the axis of --buckets, and only one axis of {_names(clash)} may be open besides "
            "the batch: export the model with fixed lengths of its other axes, or omit --buckets and give the lengths: "
            f"{' '.join(options)}"
        )
    numbers = [value.name for value in values if not value.type.tensor_type.shape.dim]
    options += [f"--input {name}=NUMBER" for name in numbers]  # a number to copy would be built in silently
    also = f"Without axes, an input is one number for a whole batch: {_names(numbers)}. " if numbers else ""
    buckets = f"or some lengths: --buckets {keys[0]}" if len(set(keys)) == 1 else "or keep one open with --buckets"
    raise SourceInvalid(
        f"{_joined(found)} {are} open; only the batch axis may be open. "
        f"{also}Give {'its length' if len(keys) == 1 else 'the lengths'}{' and this NUMBER' if numbers else ''}: "
        f"{' '.join(options)}, {buckets}"
    )


def _shape(name: str, dims: Any) -> tuple[int, ...]:
    if not dims:
        raise SourceInvalid(
            f"input {name!r} has no axes, so it is one number for a whole batch: give it as --input {name}=NUMBER, "
            "and it becomes a constant of the model; or export the model with one value per sample, [N, 1]"
        )
    if len(dims) > MAX_RANK:
        raise SourceInvalid(f"input {name!r} has {len(dims)} axes; an input has at most {MAX_RANK}, the batch included")
    lengths = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in dims]
    if lengths[0] not in (-1, 1):
        with_batch = f"--input {name}=1,{lengths[0]}{option_for(name, dims).partition('=1')[2]}"
        advice = f"if the model has no batch, give it a batch axis of 1: {with_batch}; or "
        if len(lengths) == 4:
            advice = f"for images, give other lengths as {option_for(name, dims)}; or "
        raise SourceInvalid(
            f"axis 0 of input {name!r} {described(dims)} has {lengths[0]} elements, so it is not the batch: {advice}export the "
            "model with the batch as axis 0, open (dynamic) or of length 1, or give the batch's axis the name of axis 0 of another input or of an output"
        )
    return tuple(lengths)


def _joined(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
