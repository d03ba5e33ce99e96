"""One request through the model: preprocess -> cache -> batcher and engine -> postprocess -> frame.

Each stage takes arrays and gives arrays; the time between is noted as it goes by, in nanoseconds.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert import wire
from edgert.arrays import from_wire, to_wire
from edgert.errors import RequestError
from edgert.processing.classify import softmax, top_k
from edgert.processing.preprocess import byte_spec, preprocessor
from edgert.serving.batcher import Answer, Batcher
from edgert.serving.cache import PredictionCache
from edgert.serving.model import LoadedModel
from edgert.tensors import TensorSpec, batchable, fits

ROWS_MAX = 1024
SHARED_ITEMS = 8
SHARED_BYTES_MIN = 256 * 1024

Arrays = list[NDArray[Any]]


class Served(NamedTuple):
    """An answer ready to be sent: the RESULT frame's buffers, and what the request's span will say (us)."""

    parts: list[wire.Buffer]
    body_bytes: int
    stages: tuple[int, int, int, int, int, int]
    batch: int
    cache_hit: bool


class Pipeline:
    """Serves one loaded model. `infer` may be called from many threads at once."""

    def __init__(self, model: LoadedModel, batcher: Batcher, cache: PredictionCache, rows_max: int = ROWS_MAX) -> None:
        manifest = model.version.manifest
        self.inputs = manifest.inputs
        self._classify = manifest.classify
        self._batcher, self._cache, self._rows_max = batcher, cache, rows_max
        self._batchable = batchable(manifest.inputs)
        self._byte_specs: dict[int, TensorSpec] = {}
        if manifest.preprocess is not None:
            index = next(i for i, s in enumerate(manifest.inputs) if s.name == manifest.preprocess.input)
            self._byte_specs[index] = byte_spec(manifest.preprocess, manifest.inputs[index])
            self._preprocess = preprocessor(manifest.preprocess, manifest.inputs[index])
        self.outputs = (*manifest.outputs, *self._class_specs())
        self._classified = next(
            (i for i, s in enumerate(manifest.outputs) if self._classify and s.name == self._classify.output), 0
        )

    @property
    def shared_bytes(self) -> int:
        """How large a half of a client's shared memory should be: for the larger of eight items in or out."""
        sizes = [sum(_item_bytes(spec) for spec in specs) for specs in (self.inputs, self.outputs)]
        return max(SHARED_BYTES_MIN, SHARED_ITEMS * max(sizes))

    def welcome(self) -> dict[str, Any]:
        """What a client is told about the model when it connects."""
        value: dict[str, Any] = {
            "inputs": [spec.as_json() for spec in self.inputs],
            "outputs": [spec.as_json() for spec in self.outputs],
        }
        if self._byte_specs:
            value["preprocess"] = {"input": next(iter(self._byte_specs.values())).as_json()}
        if self._classify is not None and sum(map(len, self._classify.labels)) < wire.META_BYTES_MAX // 8:
            value["labels"] = list(self._classify.labels)
        return value

    def arrays(self, tensors: tuple[wire.WireTensor, ...]) -> Arrays:
        """NumPy views over a frame's tensors. Raises RequestError when they are not what the model takes."""
        if len(tensors) != len(self.inputs):
            raise RequestError(f"the model takes {len(self.inputs)} inputs, the request has {len(tensors)}")
        arrays = []
        for i, (tensor, spec) in enumerate(zip(tensors, self.inputs, strict=True)):
            given_as_bytes = i in self._byte_specs and tensor.datatype == "UINT8" and spec.datatype != "UINT8"
            wanted = self._byte_specs[i] if given_as_bytes else spec
            if tensor.number != i or not fits(wanted, tensor.datatype, tensor.shape):
                raise RequestError(
                    f"input {i} ({spec.name!r}) takes {wanted.datatype} {list(wanted.shape)}, "
                    f"got {tensor.datatype} {list(tensor.shape)}"
                )
            arrays.append(from_wire(tensor))
        self._check_rows(arrays)
        return arrays

    def infer(self, request: wire.Frame, arrays: Arrays, decode_ns: int, deadline_s: float | None) -> Served:
        """Answer one request. Raises EdgeRTError; the caller sends it on."""
        now = time.perf_counter_ns
        preprocess_ns = cache_ns = postprocess_ns = 0
        began_ns = now()
        if self._byte_specs:
            arrays = self._preprocessed(arrays)
            preprocessed_ns = now()
            preprocess_ns, began_ns = preprocessed_ns - began_ns, preprocessed_ns
        rows = len(arrays[0]) if self._batchable else 1
        if request.flags & wire.FLAG_NO_CACHE or not self._cache.on:
            outputs, queue_ns, engine_ns, batch = self._batcher.infer(arrays, rows, deadline_s)
            hit = False
        else:
            (outputs, queue_ns, engine_ns, batch), hit = self._ask_cache(arrays, rows, deadline_s)
            cache_ns = now() - began_ns - queue_ns - engine_ns
        if self._classify is not None:
            answered_ns = now()
            outputs = [*outputs, *self._top_classes(outputs[self._classified])]
            postprocess_ns = now() - answered_ns
        stages = (
            decode_ns // 1000,
            preprocess_ns // 1000,
            cache_ns // 1000,
            queue_ns // 1000,
            engine_ns // 1000,
            postprocess_ns // 1000,
        )
        parts = wire.frame(
            wire.RESULT,
            request_id=request.request_id,
            flags=wire.FLAG_CACHE_HIT if hit else 0,
            arg=batch,
            tensors=[to_wire(i, array) for i, array in enumerate(outputs)],
            stages=stages,
        )
        return Served(parts, sum(map(len, parts)) - 64, stages, batch, hit)

    def _preprocessed(self, arrays: Arrays) -> Arrays:
        for i in self._byte_specs:
            if arrays[i].dtype == np.uint8 and self.inputs[i].datatype != "UINT8":
                return [*arrays[:i], self._preprocess(arrays[i]), *arrays[i + 1 :]]
        return arrays

    def _ask_cache(self, arrays: Arrays, rows: int, deadline_s: float | None) -> tuple[Answer, bool]:
        """The answer, and whether the cache or a request under way had it; then no engine time is stated."""
        cache = self._cache
        began_ns = time.perf_counter_ns()
        key = cache.key(arrays)
        hash_ns = time.perf_counter_ns() - began_ns
        runs: list[Answer] = []

        def run_engine() -> Arrays:
            runs.append(self._batcher.infer(arrays, rows, deadline_s))
            return runs[0].outputs

        outputs, hit = cache.get_or_run(key, run_engine, deadline_s)
        cache.judge(hit, hash_ns, runs[0].engine_ns if runs else 0)
        if not runs:
            return Answer(outputs, 0, 0, 0), hit
        return runs[0]._replace(outputs=outputs), hit

    def _check_rows(self, arrays: Arrays) -> None:
        if not self._batchable:
            return
        rows = {len(array) for array in arrays}
        if len(rows) != 1:
            raise RequestError(f"the inputs have batches of {sorted(rows)} items; give all the same number")
        if not 1 <= (count := rows.pop()) <= self._rows_max:
            raise RequestError(f"a request of {count} items; 1 to {self._rows_max} are taken: split it")

    def _class_specs(self) -> tuple[TensorSpec, ...]:
        if self._classify is None:
            return ()
        name = self._classify.output
        return (TensorSpec(f"{name}_classes", "INT64", (-1, -1)), TensorSpec(f"{name}_probabilities", "FP32", (-1, -1)))

    def _top_classes(self, scores: NDArray[Any]) -> Arrays:
        assert self._classify is not None
        shares = softmax(scores) if self._classify.softmax else scores.astype(np.float32, copy=False)
        return list(top_k(shares, self._classify.top_k))


def _item_bytes(spec: TensorSpec) -> int:
    """The bytes of one item, an axis of open length counted once, and its descriptor and padding."""
    return math.prod(max(1, n) for n in spec.item_shape) * spec.dtype.itemsize + 2 * wire.ALIGNMENT
