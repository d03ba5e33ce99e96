"""The model as the user gave it: an ONNX file, read once, checked once, described in our terms.

The file is untrusted. What Python can check is checked here; ONNX's checker and ONNX Runtime, whose
native code a hostile file could crash, see it first in a process of their own (`source_probe`), which
also runs it once, so that shapes which no inference finds are known from the answer itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.errors import SourceInvalid
from edgert.tensors import DATATYPES, MAX_RANK, TensorSpec
from edgert_deploy.source_probe import Probed, probe

SOURCE_BYTES_MAX = 2**31 - 1  # what one protobuf message holds
NAME_LENGTH_MAX = 255


@dataclass(frozen=True)
class SourceModel:
    """A checked ONNX model. `inputs` and `outputs` are the contract that every artifact keeps.

    The batch axis (axis 0) is -1 where the model leaves it open; every other axis is a fixed length.
    """

    path: Path
    proto: Any  # onnx.ModelProto
    sha256: str
    size_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def load_source(path: Path) -> SourceModel:
    """Read and check an ONNX file.

    Raises SourceInvalid, saying what to change: not ONNX, external data, an axis beyond the batch
    left open, no static type, no input or output, a datatype that we do not carry.
    """
    data = _read(path)
    proto = _parse(path, data)
    _refuse_external_data(path, proto)
    inputs = _input_specs(proto)
    outputs = _output_specs(proto, inputs, probe(data, inputs))
    return SourceModel(path, proto, hashlib.sha256(data).hexdigest(), len(data), inputs, outputs)


def computes_in_fp16(proto: Any) -> bool:
    """Whether any weight of the model is FP16."""
    from onnx import TensorProto

    return any(tensor.data_type == TensorProto.FLOAT16 for tensor in _tensors(proto))


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise SourceInvalid(f"{path} is not a file; give the .onnx file of the model")
        if path.stat().st_size > SOURCE_BYTES_MAX:
            raise SourceInvalid(
                f"{path} has {path.stat().st_size} bytes; a single-file ONNX model has at most {SOURCE_BYTES_MAX}"
            )
        return path.read_bytes()
    except OSError as error:
        raise SourceInvalid(f"cannot read {path}: {error.strerror}") from error


def _parse(path: Path, data: bytes) -> Any:
    from onnx import ModelProto

    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError, whose module has no types
        raise SourceInvalid(f"{path} is not an ONNX model: its bytes are no ONNX protobuf") from error
    # Protobuf takes many a stray file for a message without known fields.
    if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
        raise SourceInvalid(f"{path} is not an ONNX model: it has no IR version, opset or graph")
    if not proto.graph.output:
        raise SourceInvalid("the model has no output; export it with the tensors that you want to read")
    if not proto.graph.node:
        raise SourceInvalid(f"{path} holds no operator; export the model with its weights and layers")
    return proto


def _refuse_external_data(path: Path, proto: Any) -> None:
    for tensor in _tensors(proto):
        if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
            raise SourceInvalid(
                f"{path.name} keeps tensor {tensor.name[:80]!r} in another file; put all weights into one file: "
                f"python -c \"import onnx; onnx.save(onnx.load('{path.name}'), 'one-file.onnx')\""
            )


def _tensors(message: Any) -> Iterator[Any]:
    """Every TensorProto anywhere inside `message` (protobuf bounds the nesting to 100)."""
    from onnx import TensorProto

    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for child in [value] if hasattr(value, "ListFields") else value:
            if isinstance(child, TensorProto):
                yield child
            elif hasattr(child, "ListFields"):
                yield from _tensors(child)


def _input_specs(proto: Any) -> tuple[TensorSpec, ...]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    specs = tuple(_spec(value, "input") for value in proto.graph.input if value.name not in weights)
    if not specs:
        raise SourceInvalid("the model has no input; export it so that the data is an input, not a constant")
    open_batch = {spec.name: spec.shape[0] == -1 for spec in specs}
    if len(set(open_batch.values())) > 1:
        raise SourceInvalid(
            f"some inputs leave the batch axis open ({_names(n for n, o in open_batch.items() if o)}) and others do not "
            f"({_names(n for n, o in open_batch.items() if not o)}); export all of them with an open axis 0, or none"
        )
    return specs


def _output_specs(proto: Any, inputs: tuple[TensorSpec, ...], probed: Probed) -> tuple[TensorSpec, ...]:
    return tuple(
        _output_spec(value.name, probed, batch_is_open=inputs[0].shape[0] == -1) for value in proto.graph.output
    )


def _output_spec(name: str, probed: Probed, *, batch_is_open: bool) -> TensorSpec:
    """The spec of an output, from the shapes that one and (where the batch is open) two samples gave."""
    datatype, shapes = probed.datatypes[name], probed.shapes[name]
    if datatype not in DATATYPES:
        raise SourceInvalid(f"output {name!r} is of type {datatype!r}; EdgeRT carries {', '.join(DATATYPES)}")
    one, most = shapes[0], shapes[-1]
    if not batch_is_open:
        if not one or one[0] != 1:
            raise SourceInvalid(
                f"output {name!r} has shape {list(one)}; axis 0 must be the batch, of length 1 as the input's"
            )
        return TensorSpec(name, DATATYPES[datatype], one)
    if not one or (one[0], most[0]) != (1, 2) or one[1:] != most[1:]:
        raise SourceInvalid(
            f"output {name!r} has shape {list(one)} for one sample and {list(most)} for two; axis 0 of every output must "
            "count the samples: change that output, or export the model with batch fixed to 1"
        )
    return TensorSpec(name, DATATYPES[datatype], (-1, *one[1:]))


def _spec(value: Any, kind: str) -> TensorSpec:
    from onnx.helper import tensor_dtype_to_np_dtype

    if not value.name or len(value.name) > NAME_LENGTH_MAX:
        raise SourceInvalid(
            f"an {kind} of the model has no name, or one of more than {NAME_LENGTH_MAX} letters: rename it"
        )
    if not value.type.HasField("tensor_type"):
        raise SourceInvalid(f"{kind} {value.name!r} is no tensor; only tensors can be inputs and outputs")
    tensor = value.type.tensor_type
    try:
        dtype = tensor_dtype_to_np_dtype(tensor.elem_type).name
    except KeyError:
        dtype = f"number {tensor.elem_type}"
    dtype = "text" if dtype == "object" else dtype
    if dtype not in DATATYPES:
        raise SourceInvalid(f"{kind} {value.name!r} has element type {dtype}; EdgeRT carries {', '.join(DATATYPES)}")
    if not tensor.HasField("shape"):
        raise SourceInvalid(f"{kind} {value.name!r} states no shape; export the model with its input shape")
    return TensorSpec(value.name, DATATYPES[dtype], _shape(value.name, tensor.shape.dim))


def _shape(name: str, dims: Any) -> tuple[int, ...]:
    if not 1 <= len(dims) <= MAX_RANK:
        raise SourceInvalid(
            f"input {name!r} has {len(dims)} axes; 1 to {MAX_RANK} are taken, the first being the batch"
        )
    lengths = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in dims]
    if lengths[0] not in (-1, 1):
        raise SourceInvalid(
            f"input {name!r} has a batch axis fixed to {lengths[0]}; export the model with axis 0 open (dynamic) or of length 1"
        )
    for axis, length in enumerate(lengths[1:], start=1):
        if length == -1:
            param = dims[axis].dim_param or "?"
            raise SourceInvalid(
                f"axis {axis} ({param}) of input {name!r} is open; only the batch axis may be. Fix it: "
                f"python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param {param} --dim_value LENGTH in.onnx out.onnx"
            )
    return tuple(lengths)


def _names(names: Iterator[str]) -> str:
    return ", ".join(repr(name) for name in names)
