"""The source model that the user gives: reads and checks the file once.

The file is untrusted. First, a child process with bounded memory and time reads the file, checks it and runs the model
(probe.py). The run also shows the shapes that no shape inference finds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.bundle.state import State, Stateful
from edgert.durable import os_error_as
from edgert.engines import LocalArtifact
from edgert.errors import BuildFailed, SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.formats.convert import Conversion, converted, digest_and_size, framework_of
from edgert_deploy.packager.sources.formats.external_data import open_file, size_of
from edgert_deploy.packager.sources.formats.git_lfs import pointer_problem
from edgert_deploy.packager.sources.formats.other_formats import other_format
from edgert_deploy.packager.sources.onnx_graph.axes import fix_batch, forget_shapes
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import float_of, is_quantized
from edgert_deploy.packager.sources.probe import ProbeRequest, external_files, probe
from edgert_deploy.packager.sources.tflite_model import is_tflite

SOURCE_BYTES_MAX = 2**31 - 1  # the limit of a protobuf message and of a flatbuffer's offsets

Kind = Literal["onnx", "tflite"]
HEAD = "edgert_fold_"  # the start of the names of folded-in preprocessing nodes, which stay in float


@dataclass(frozen=True)
class Fold:
    """Preprocessing that became the first layers of a model; `inner` is the model without it.

    UINT8 frames in `layout` become (value * scale - mean) / std in `model_layout`, with the channels in reverse order
    if `flips` is true.
    """

    inner: Any
    input: str
    layout: str
    model_layout: str
    flips: bool
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def factor_and_shift(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the arrays `factor` and `shift`: the layers compute value * factor + shift.

        Each array has one number, or one for each channel.
        """
        mean, std = np.broadcast_arrays(np.asarray(self.mean, np.float64), np.asarray(self.std, np.float64))
        return self.scale / std, -mean / std


@dataclass(frozen=True)
class SourceModel(Stateful):
    """A checked model.

    Attributes:
        proto: The ModelProto of an ONNX model, in an opset that every runtime accepts; else None.
        sha256: The SHA-256 of the given file.
        size_bytes: The size of the given file.
        inputs: The inputs that every artifact keeps. Axis 0 is the batch, -1 if the model leaves it open. Every other
            axis has a fixed length, except an axis with buckets.
        outputs: The outputs that every artifact keeps. Their axes follow the rules of `inputs`.
        tflite: The content of a TFLite model; else empty.
        quantized: Whether the user's training or converter quantized the model. The build then keeps this quantization.
        fold: The preprocessing that became the first layers; None if there is none.
        remarks: The differences between the contract and the file.
        buckets: The lengths for the one axis that stays open besides the batch; None if all other axes are fixed.
        state: The outputs that become inputs of the next item. Apps see neither these outputs nor these inputs.
        converted_bytes: The size of the converted ONNX model if the file is of another framework; else 0.
        unread: The inputs of the file that no operator reads. Artifacts do not have these inputs.
        scales: The scale and the zero point of inputs in INT8, for the presets.
    """

    path: Path
    proto: Any
    sha256: str
    size_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kind: Kind = "onnx"
    tflite: bytes = b""
    quantized: bool = False
    fold: Fold | None = None
    remarks: tuple[str, ...] = ()
    buckets: Buckets | None = None
    state: tuple[State, ...] = ()
    converted_bytes: int = 0
    unread: tuple[str, ...] = ()
    scales: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def model_bytes(self) -> int:
        """The size of the FP32 model, without the optimizers that a framework may keep in its file."""
        return self.converted_bytes or self.size_bytes


def load_source(path: Path, conversion: Conversion | None = None) -> SourceModel:
    """Read and check a model; convert other formats first. Raises SourceInvalid or ConfigInvalid."""
    framework = framework_of(path)
    conversion = conversion or Conversion()
    _check_is_model(path, framework)
    if framework is not None:
        data = converted(path, framework, conversion)
        sha256, size_bytes = digest_and_size(path)
    else:
        data = _read(path)
        sha256, size_bytes = hashlib.sha256(data).hexdigest(), len(data)
    kind: Kind = "tflite" if is_tflite(data) else "onnx"
    if kind == "tflite" and conversion.buckets is not None:
        raise SourceInvalid(f"{path.name} is a TFLite model, whose axes are fixed: give the ONNX model for --buckets")
    shapes = conversion.shapes
    if framework == "torch":  # the conversion already set these lengths, and left the batch open
        shapes = {name: [1, *lengths[1:]] for name, lengths in shapes.items()}
    beside = external_files(path.name, data) if kind == "onnx" and framework is None else []
    beside_bytes = size_of(path, beside)
    request = ProbeRequest(path.name, str(path.parent), shapes, conversion.buckets)
    probed = probe(kind, request, data, beside_bytes)
    if beside:
        sha256, size_bytes = _digest_of_all(path, data, beside)
    proto, quantized = (None, probed.quantized) if kind == "tflite" else _parsed(probed.data)
    return SourceModel(
        path,
        proto,
        sha256,
        size_bytes,
        probed.inputs,
        probed.outputs,
        kind,
        tflite=probed.data if kind == "tflite" else b"",
        quantized=quantized,
        remarks=probed.remarks,
        converted_bytes=len(data) if framework is not None else 0,
        buckets=probed.buckets,
        unread=probed.unread,
        scales=probed.scales,
    )


def _check_is_model(path: Path, framework: str | None) -> None:
    """Raise SourceInvalid for a pointer of Git LFS, a pipe, a device or a file of an unsupported format."""
    for file in sorted(path.rglob("*")) if path.is_dir() and framework else [path]:
        if problem := pointer_problem(file):
            raise SourceInvalid(problem)
    if problem := other_format(path):
        raise SourceInvalid(problem)


def _parsed(data: bytes) -> tuple[Any, bool]:
    """Return the ModelProto of a probed ONNX model, and whether its activations are quantized."""
    from onnx import ModelProto

    proto = ModelProto()
    proto.ParseFromString(data)
    quantized = is_quantized(proto)
    if not quantized and any(node.op_type == "DequantizeLinear" for node in proto.graph.node):
        with contextlib.suppress(BuildFailed):
            proto = float_of(proto)  # only its weights are in INT8; it computes in float
    return proto, quantized


def reference_engine(source: SourceModel) -> str:
    """Return the engine that runs the source itself."""
    return "tflite" if source.kind == "tflite" else "onnxruntime"


def reference_artifact(source: SourceModel, folder: Path) -> LocalArtifact:
    """Write the source, the reference for artifacts, to `folder` in a form that this host can run."""
    name = "source.tflite" if source.kind == "tflite" else "source.onnx"
    data = source.tflite or source.proto.SerializeToString(deterministic=True)
    (folder / name).write_bytes(data)
    return LocalArtifact(reference_engine(source), folder / name, source.inputs, source.outputs, source.sha256)


def at_length(source: SourceModel, length: int) -> SourceModel:
    """Return an ONNX source in which the axis with buckets is fixed to `length`."""
    assert source.buckets is not None
    proto = copy_of(source.proto)
    specs = [tuple(source.buckets.spec_at(spec, length) for spec in specs) for specs in (source.inputs, source.outputs)]
    for place in source.buckets.inputs:
        value = next(value for value in proto.graph.input if value.name == place.name)
        value.type.tensor_type.shape.dim[place.axis].dim_value = length  # also removes the axis's name
    forget_shapes(proto)
    return replace(source, proto=proto, inputs=specs[0], outputs=specs[1], buckets=None)


def with_fixed_batch(source: SourceModel) -> SourceModel:
    """Return an ONNX source whose graph has a batch of 1. The contract stays the same."""
    proto = copy_of(source.proto)
    fix_batch(proto)
    return replace(source, proto=proto)


def float_proto(source: SourceModel) -> Any:
    """Return the ONNX model in float; a quantized model loses its Q/DQ. Raises BuildFailed."""
    return float_of(source.proto) if source.quantized else source.proto


def _digest_of_all(path: Path, data: bytes, beside: list[str]) -> tuple[str, int]:
    """Return the SHA-256 and the size of the model's file together with its separate files of weights."""
    digest, size = hashlib.sha256(data), len(data)
    for location in beside:
        with open_file(path, location) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    return digest.hexdigest(), size


def _read(path: Path) -> bytes:
    with os_error_as(SourceInvalid, f"cannot read {path}"):
        if not path.is_file():
            raise SourceInvalid(
                f"{path} is not a file; give the .onnx, .tflite, .keras, .h5, .pt2 or .pt file of the "
                "model, or the folder of a SavedModel"
            )
        if path.stat().st_size > SOURCE_BYTES_MAX:
            raise SourceInvalid(
                f"{path} has {path.stat().st_size} bytes; one file of a model has at most {SOURCE_BYTES_MAX} (the limit "
                "of protobuf and of flatbuffers): use a smaller variant"
            )
        return path.read_bytes()
