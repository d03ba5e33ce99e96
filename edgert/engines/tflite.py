"""TFLite, the engine for ARM: `ai-edge-litert`, or `tflite-runtime` on a system without its wheel.

An interpreter is planned for one batch size, and a new plan takes milliseconds. So each bucket has its own interpreter
over the same memory-mapped file, opened when the bucket is first needed. A batch between two buckets is padded and its
answers are cut. A batch above the largest bucket runs in several pieces. If the file has a fixed batch of 1 but the
model's batch is open, the items of a batch run one by one. A model with buckets of another axis has one file for each
bucket; the artifact's own file is for the largest bucket. Interpreters copy in and out with `set_tensor` and
`get_tensor`. These calls are faster than views into the interpreters' memory (1.3 µs per call instead of 2.6 µs), and
`get_tensor` returns a new array.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.engines import Engine, EngineOptions, LocalArtifact, Session, bucket_for, closed
from edgert.engines.padding import in_pieces
from edgert.errors import EngineFailed, EngineMissing
from edgert.tensors import TensorSpec, batchable

# Distributions and their modules, in order of preference.
_SDKS = (("ai-edge-litert", "ai_edge_litert.interpreter"), ("tflite-runtime", "tflite_runtime.interpreter"))
# The exceptions of the interpreter and of its NumPy wrapper.
_SDK_ERRORS = (RuntimeError, ValueError, TypeError, OSError, MemoryError)


class TFLiteEngine(Engine):
    name = "tflite"

    def version(self) -> str:
        distribution, _, _ = _sdk()
        return f"{distribution} {importlib.metadata.version(distribution)}"

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> Session:
        _, interpreter_class, resolvers = _sdk()
        threads = options.threads or None  # None lets TFLite choose
        extra = {}
        if kernels := options.extra.get("experimental_op_resolver_type"):
            extra["experimental_op_resolver_type"] = getattr(resolvers, kernels)

        def open_file(path: Path) -> Any:
            return interpreter_class(model_path=str(path), num_threads=threads, **extra)

        if artifact.buckets is None:
            return TFLiteSession(artifact, options.buckets, lambda: open_file(artifact.path))
        return _LengthsSession(artifact, artifact.buckets, options.buckets, open_file)


def path_for(path: Path, size: int, buckets: Buckets) -> Path:
    """Return the file for a bucket's `size`; the artifact's own file is for the largest bucket."""
    return path if size == buckets.largest else path.with_name(f"{path.stem}-{size}{path.suffix}")


class TFLiteSession(Session):
    """A session with one interpreter for each bucket; `make_interpreter` opens the artifact again."""

    def __init__(self, artifact: LocalArtifact, buckets: Sequence[int], make_interpreter: Callable[[], Any]) -> None:
        self.inputs, self.outputs = artifact.inputs, artifact.outputs
        self._name = artifact.path.name
        self._make_interpreter = make_interpreter
        self._open_input = next((i for i, spec in enumerate(self.inputs) if spec.shape[:1] == (-1,)), None)
        # Padding needs one output item per input item.
        self._pads = batchable((*self.inputs, *self.outputs))
        self._by_size: dict[int, _Bucket] = {}
        self._by_count: dict[int, _Bucket] = {}
        try:
            first = make_interpreter()
            self._buckets = [1] if self._pads and _has_fixed_batch(first) else sorted(buckets)
            self._bucket(1, first)
        except _SDK_ERRORS as error:
            raise EngineFailed(f"tflite cannot load {self._name}: {error}; build it again") from error

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        try:
            count = 1 if self._open_input is None else len(tensors[self._open_input])
            bucket = self._by_count.get(count)
            if bucket is not None:
                return bucket.run(tensors, count)
            if self._pads and count > self._buckets[-1]:
                return in_pieces(self, tensors, self._buckets[-1])
            return self._bucket(count).run(tensors, count)
        except _SDK_ERRORS as error:
            raise EngineFailed(f"tflite cannot run this batch on {self._name}: {error}") from error

    def close(self) -> None:
        self._by_size.clear()
        self._by_count.clear()
        self._make_interpreter = closed

    def _bucket(self, count: int, interpreter: Any = None) -> _Bucket:
        """Return the bucket for `count` items; without padding, keep only the bucket of the last size.

        A new bucket gets the fresh `interpreter`, if given.
        """
        size = bucket_for(count, self._buckets) if self._pads else count
        if size not in self._by_size:
            if not self._pads:
                self._by_size.clear()
                self._by_count.clear()
            self._by_size[size] = _Bucket(interpreter or self._make_interpreter(), self.inputs, self.outputs, size)
        self._by_count[count] = self._by_size[size]
        return self._by_size[size]


class _LengthsSession(Session):
    """One session for each size of a model's buckets, opened when the size is first needed."""

    def __init__(
        self, artifact: LocalArtifact, buckets: Buckets, batches: Sequence[int], open_file: Callable[[Path], Any]
    ) -> None:
        self.inputs, self.outputs = artifact.inputs, artifact.outputs
        self._artifact = artifact
        self._buckets = buckets
        self._batches = batches
        self._open_file: Callable[[Path], Any] = open_file
        first = buckets.inputs[0]
        self._place = ([spec.name for spec in self.inputs].index(first.name), first.axis)
        self._by_length: dict[int, TFLiteSession] = {}

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        length = tensors[self._place[0]].shape[self._place[1]]
        if length not in self._by_length:
            self._by_length[length] = self._open(length)
        return self._by_length[length].run(tensors)

    def close(self) -> None:
        for session in self._by_length.values():
            session.close()
        self._by_length.clear()
        self._open_file = closed

    def _open(self, length: int) -> TFLiteSession:
        inputs, outputs = (
            tuple(self._buckets.spec_at(spec, length) for spec in specs) for specs in (self.inputs, self.outputs)
        )
        path = path_for(self._artifact.path, length, self._buckets)
        artifact = replace(self._artifact, path=path, inputs=inputs, outputs=outputs, buckets=None)
        return TFLiteSession(artifact, self._batches, lambda: self._open_file(path))


class _Bucket:
    """An interpreter that is planned for `size` items."""

    def __init__(
        self, interpreter: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], size: int
    ) -> None:
        self._size = size
        self._inputs = _indices(interpreter, "input", inputs)
        shapes = [tuple(size if n == -1 else n for n in spec.shape) for spec in inputs]
        for index, spec, shape in zip(self._inputs, inputs, shapes, strict=True):
            if -1 in spec.shape:
                interpreter.resize_tensor_input(index, shape)
        interpreter.allocate_tensors()
        self._outputs = _indices(interpreter, "output", outputs)
        # Input buffers for smaller batches. Items after the batch are zeros or from an earlier batch: their answers are
        # cut.
        self._padded = [np.zeros(shape, spec.dtype) for spec, shape in zip(inputs, shapes, strict=True)]
        self._set, self._invoke, self._get = interpreter.set_tensor, interpreter.invoke, interpreter.get_tensor

    def run(self, tensors: Sequence[NDArray[Any]], count: int) -> list[NDArray[Any]]:
        if count == self._size:
            for index, tensor in zip(self._inputs, tensors, strict=True):
                self._set(index, tensor)
            self._invoke()
            return [self._get(index) for index in self._outputs]
        for index, padded, tensor in zip(self._inputs, self._padded, tensors, strict=True):
            padded[:count] = tensor
            self._set(index, padded)
        self._invoke()
        return [self._get(index)[:count] for index in self._outputs]


def _sdk() -> tuple[str, Any, Any]:
    """Return the installed distribution, its Interpreter and its OpResolverType. Raises EngineMissing."""
    reasons = []
    for distribution, module in _SDKS:
        try:
            sdk = importlib.import_module(module)
            return distribution, sdk.Interpreter, getattr(sdk, "OpResolverType", None)
        except ImportError as error:
            reasons.append(f"{distribution}: {error}")
    raise EngineMissing(
        f"engine tflite is not installed here ({'; '.join(reasons)}); install it with: pip install 'edgert[tflite]'"
    )


def _has_fixed_batch(interpreter: Any) -> bool:
    """Whether no input of the file has an open axis 0."""
    return all(list(detail["shape_signature"][:1]) != [-1] for detail in interpreter.get_input_details())


def _indices(interpreter: Any, kind: str, specs: Sequence[TensorSpec]) -> list[int]:
    """Return the index of each of `specs` in the interpreter. Raises ValueError if it has other tensors."""
    details = interpreter.get_input_details() if kind == "input" else interpreter.get_output_details()
    by_name = {detail["name"]: detail for detail in details}
    missing = [spec.name for spec in specs if spec.name not in by_name]
    if missing or len(by_name) != len(specs):
        raise ValueError(f"its {kind}s are {', '.join(by_name)}, expected {', '.join(s.name for s in specs)}")
    for spec in specs:
        if np.dtype(by_name[spec.name]["dtype"]) != spec.dtype:
            raise ValueError(f"{kind} {spec.name} has dtype {np.dtype(by_name[spec.name]['dtype'])}, not {spec.dtype}")
    return [int(by_name[spec.name]["index"]) for spec in specs]
