"""One request through the model: cache -> preprocess -> batcher and engine -> postprocess.

Each stage takes arrays and gives arrays; the time between is noted as it goes by, in nanoseconds.

The cache's key is what the client sent and its value is what the client gets, so that a hit costs no decoding of
an image and no suppression of boxes. The near cache compares what the model is shown, so it stands behind
preprocessing, and keeps the model's own answers: the same boxes lie elsewhere in an image of another size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.processing.placement import Placement
from edgert.processing.postprocess import Postprocessor
from edgert.processing.preprocess import Preprocessor
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire
from edgert.tensors import TensorSpec, batchable, fits
from edgert.worker.batcher import Answer, Batcher
from edgert.worker.cache import PredictionCache, tag_of
from edgert.worker.model import LoadedModel
from edgert.worker.near_cache import NearCache
from edgert.worker.reply import Stages
from edgert.worker.shadow import Shadow

ROWS_MAX = 1024
SHARED_ITEMS = 8
FRAME_BYTES_MIN = 64 * 1024
SHARED_BYTES_MIN = 256 * 1024
SHARED_BYTES_MIN_IMAGES = 8 * 1024**2  # a 1080p frame

Arrays = list[NDArray[Any]]
_new = tuple.__new__  # a named tuple's own constructor is a Python function that calls it


class Asked(NamedTuple):
    """What a request's tensors say; it holds for every request whose tensors look and lie the same.

    `given`: they are an image or UINT8 values, not the model's own tensors. `tag` stands for dtypes and shapes.
    """

    arrays: Arrays
    rows: int
    given: bool
    tag: bytes


class Served(NamedTuple):
    """An answer: what the RESULT frame says, output i as its tensor `numbers[i]`. `stages` are microseconds."""

    outputs: Arrays
    numbers: list[int]
    batch: int
    flags: int
    stages: Stages


class _Work:
    """One request under way: `arrays` as they came, then as the model takes them. Durations are nanoseconds."""

    __slots__ = (
        "arrays",
        "came_ns",
        "deadline_s",
        "given",
        "high",
        "placements",
        "postprocess_ns",
        "preprocess_ns",
        "rows",
        "tag",
    )

    def __init__(self, asked: Asked, deadline_s: float | None, high: bool, came_ns: int) -> None:
        self.arrays, self.rows, self.given, self.tag = asked
        self.deadline_s, self.high, self.came_ns = deadline_s, high, came_ns
        self.placements: list[Placement] | None = None
        self.preprocess_ns = self.postprocess_ns = 0


class Pipeline:
    """Serves one loaded model. `infer` may be called from many threads at once."""

    def __init__(
        self,
        model: LoadedModel,
        batcher: Batcher,
        cache: PredictionCache,
        rows_max: int = ROWS_MAX,
        near: NearCache | None = None,
        shadows: Sequence[Shadow] = (),
    ) -> None:
        manifest = model.version.manifest
        self.inputs = manifest.inputs
        self._batcher, self._cache, self._rows_max = batcher, cache, rows_max
        self._near, self._shadows = near, tuple(shadows)
        self._batchable = batchable(manifest.inputs)
        self._image = 0  # which input is preprocessed
        self._pre: Preprocessor | None = None
        if manifest.preprocess is not None:
            self._image = next(i for i, s in enumerate(manifest.inputs) if s.name == manifest.preprocess.input)
            self._pre = Preprocessor(manifest.preprocess, manifest.inputs[self._image])
        self._post: Postprocessor | None = None
        self.outputs = manifest.outputs
        self._labels: tuple[str, ...] = ()
        if manifest.classify is not None or manifest.detect is not None:
            self._post = Postprocessor(manifest)
            self.outputs, self._labels = self._post.outputs, self._post.labels
        # What is sent, by whether an image is given: indices into `outputs`.
        self._numbers = (self._numbers_for(False), self._numbers_for(True))

    def frame_bytes_max(self, configured_bytes: int) -> int:
        """No frame of this model need be larger: what was configured, or less where the model takes and gives less."""
        open_ended = any(n == -1 for spec in (*self.inputs, *self.outputs) for n in spec.item_shape)
        if open_ended or self._pre is not None:  # an image may be larger than what the model is shown of it
            return configured_bytes
        sizes = [sum(_item_bytes(spec) for spec in specs) for specs in (self.inputs, self.outputs)]
        return min(configured_bytes, FRAME_BYTES_MIN + self._rows_max * max(sizes))

    @property
    def shared_bytes(self) -> int:
        """How large a half of a client's shared memory should be: for the larger of eight items in or out."""
        sizes = [sum(_item_bytes(spec) for spec in specs) for specs in (self.inputs, self.outputs)]
        least = SHARED_BYTES_MIN if self._pre is None or not self._pre.of_images else SHARED_BYTES_MIN_IMAGES
        return max(least, SHARED_ITEMS * max(sizes))

    def welcome(self) -> dict[str, Any]:
        """What a client is told about the model when it connects."""
        value: dict[str, Any] = {
            "inputs": [spec.as_json() for spec in self.inputs],
            "outputs": [spec.as_json() for spec in self.outputs],
        }
        if self._pre is not None:
            value["preprocess"] = {"input": self._pre.frames.as_json()}
            if self._pre.files is not None:
                value["preprocess"]["files"] = self._pre.files.as_json()
        if self._labels and sum(map(len, self._labels)) < wire.META_BYTES_MAX // 8:
            value["labels"] = list(self._labels)
        return value

    def read(self, tensors: tuple[wire.WireTensor, ...]) -> Asked:
        """Views over a frame's tensors. Raises RequestError when they are not what the model takes."""
        if len(tensors) != len(self.inputs):
            raise RequestError(f"the model takes {len(self.inputs)} inputs, the request has {len(tensors)}")
        arrays = []
        for i, (tensor, spec) in enumerate(zip(tensors, self.inputs, strict=True)):
            forms = self._pre.forms if self._pre is not None and i == self._image else (spec,)
            if tensor.number != i or not any(fits(form, tensor.datatype, tensor.shape) for form in forms):
                wanted = " or ".join(f"{form.datatype} {list(form.shape)}" for form in forms)
                raise RequestError(
                    f"input {i} ({spec.name!r}) takes {wanted}, got {tensor.datatype} {list(tensor.shape)}"
                )
            arrays.append(from_wire(tensor))
        given = self._pre is not None and self._pre.wants(arrays[self._image])
        return Asked(arrays, self._rows(arrays), given, tag_of(arrays))

    def infer(self, asked: Asked, flags: int, came_ns: int, deadline_s: float | None) -> Served:
        """Answer one request that came at `came_ns` with the frame's `flags`. Raises EdgeRTError, to be sent on."""
        began_ns = time.perf_counter_ns()
        high = flags & wire.FLAG_HIGH_PRIORITY != 0
        cached = not flags & wire.FLAG_NO_CACHE and (self._cache.on or self._near is not None)
        if not cached and not asked.given and self._post is None:  # as `is_bare`, without the call
            outputs, queue_ns, engine_ns, batch = self._ask_engine(asked.arrays, asked.rows, deadline_s, high, came_ns)
            stages = ((began_ns - came_ns) // 1000, 0, 0, queue_ns // 1000, engine_ns // 1000, 0)
            return _new(Served, (outputs, self._numbers[0], batch, 0, stages))
        work = _Work(asked, deadline_s, high, came_ns)
        cache_ns = hit_flags = 0
        if not cached:
            outputs, queue_ns, engine_ns, batch = self._run(work)
        else:
            ask = self._ask_cache if self._near is None or work.rows != 1 else self._ask_near
            (outputs, queue_ns, engine_ns, batch), hit_flags = ask(work)
            around_ns = queue_ns + engine_ns + work.preprocess_ns + work.postprocess_ns
            cache_ns = time.perf_counter_ns() - began_ns - around_ns
        stages = (
            (began_ns - came_ns) // 1000,
            work.preprocess_ns // 1000,
            cache_ns // 1000,
            queue_ns // 1000,
            engine_ns // 1000,
            work.postprocess_ns // 1000,
        )
        return Served(outputs, self._numbers[asked.given], batch, hit_flags, stages)

    def is_bare(self, asked: Asked, flags: int) -> bool:
        """Whether the request is for the engine, and nothing around it."""
        cached = not flags & wire.FLAG_NO_CACHE and (self._cache.on or self._near is not None)
        return not cached and not asked.given and self._post is None

    def infer_together(
        self, asked: Sequence[Asked], times_ns: Sequence[tuple[int, int]], deadline_s: float | None
    ) -> list[Served]:
        """Answer bare requests that one thread has read; for each of them, when it came and when it was read.

        In one run: several have at most as many items as the batcher's cap. For one thread only. Raises EdgeRTError,
        which is then the answer to all of them.
        """
        began_ns = time.perf_counter_ns()
        answers = self._batcher.infer_together([(one.arrays, one.rows) for one in asked], deadline_s)
        served = []
        for one, (outputs, queue_ns, engine_ns, batch), (came_ns, read_ns) in zip(
            asked, answers, times_ns, strict=True
        ):
            for shadow in self._shadows:
                shadow.offer(one.arrays, outputs)
            queue_us = (began_ns - read_ns + queue_ns) // 1000
            stages = ((read_ns - came_ns) // 1000, 0, 0, queue_us, engine_ns // 1000, 0)
            served.append(_new(Served, (outputs, self._numbers[0], batch, 0, stages)))
        return served

    def _run(self, work: _Work) -> Answer:
        """The answer as it is sent, by the engine."""
        self._preprocess(work)
        answer = self._ask_engine(work.arrays, work.rows, work.deadline_s, work.high, work.came_ns)
        return answer if self._post is None else answer._replace(outputs=self._postprocessed(work, answer.outputs))

    def _ask_engine(self, arrays: Arrays, rows: int, deadline_s: float | None, high: bool, came_ns: int) -> Answer:
        answer = self._batcher.infer(arrays, rows, deadline_s, high, came_ns)
        for shadow in self._shadows:
            shadow.offer(arrays, answer.outputs)
        return answer

    def _preprocess(self, work: _Work) -> None:
        if not work.given:
            return
        assert self._pre is not None  # what else would tell a given image
        began_ns, i = time.perf_counter_ns(), self._image
        array, work.placements = self._pre(work.arrays[i], work.deadline_s)
        work.arrays = [*work.arrays[:i], array, *work.arrays[i + 1 :]]
        work.preprocess_ns = time.perf_counter_ns() - began_ns

    def _postprocessed(self, work: _Work, outputs: Arrays) -> Arrays:
        """What is sent of a model's `outputs` and of what the manifest's rules make of them."""
        if self._post is None:
            return outputs
        began_ns = time.perf_counter_ns()
        made = self._post(outputs, work.placements, work.arrays[self._image].shape)
        sent = [made[i] for i in self._numbers[work.given]]
        work.postprocess_ns = time.perf_counter_ns() - began_ns
        return sent

    def _numbers_for(self, image_given: bool) -> list[int]:
        return list(range(len(self.outputs))) if self._post is None else self._post.sent(image_given)

    def _ask_cache(self, work: _Work) -> tuple[Answer, int]:
        """The answer, and the flags that say that the cache or a request under way had it, with no engine time then."""
        cache, now = self._cache, time.perf_counter_ns
        began_ns = now()
        key = cache.key(work.arrays, work.tag)
        outputs = cache.get(key, began_ns)
        if outputs is not None:
            return Answer(outputs, 0, 0, 0), wire.FLAG_CACHE_HIT
        looked_ns = now()
        runs: list[Answer] = []
        left_ns = back_ns = 0  # when the engine was asked, and when it had answered

        def run_engine() -> Arrays:
            nonlocal left_ns, back_ns
            left_ns = now()
            runs.append(self._run(work))
            back_ns = now()
            return runs[0].outputs

        outputs, hit = cache.get_or_run(key, run_engine, work.deadline_s)
        if not runs:
            cache.judge(True, looked_ns - began_ns, 0)  # less than it took: it may have waited for another's run
            return Answer(outputs, 0, 0, 0), wire.FLAG_CACHE_HIT if hit else 0
        answer = runs[0]
        own_ns = answer.engine_ns * work.rows // max(1, answer.batch) + work.preprocess_ns + work.postprocess_ns
        cache.judge(False, now() - began_ns - (back_ns - left_ns), own_ns)
        return answer._replace(outputs=outputs), wire.FLAG_CACHE_HIT if hit else 0

    def _ask_near(self, work: _Work) -> tuple[Answer, int]:
        """As `_ask_cache`, from the near cache; a sampled near hit is answered by the engine, and compared."""
        cache = self._near
        assert cache is not None  # the caller has looked
        self._preprocess(work)
        near = cache.look(work.arrays[0]) if cache.on else None
        if near is not None and near.outputs is not None and not near.sampled:
            answer, flags = Answer(near.outputs, 0, 0, 0), wire.FLAG_CACHE_HIT | wire.FLAG_NEAR_HIT
        else:
            answer = self._ask_engine(work.arrays, work.rows, work.deadline_s, work.high, work.came_ns)
            flags = 0
            if near is not None and near.sampled:
                cache.compared(near, answer.outputs)
            elif near is not None:
                cache.keep(near, answer.outputs)
        return answer._replace(outputs=self._postprocessed(work, answer.outputs)), flags

    def _rows(self, arrays: Arrays) -> int:
        """How many items a request asks for. Raises RequestError."""
        if not self._batchable:
            return 1
        rows = {len(array) for array in arrays}
        if len(rows) != 1:
            raise RequestError(f"the inputs have batches of {sorted(rows)} items; give all the same number")
        if not 1 <= (count := rows.pop()) <= self._rows_max:
            raise RequestError(f"a request of {count} items; 1 to {self._rows_max} are taken: split it")
        return count


def _item_bytes(spec: TensorSpec) -> int:
    """The bytes of one item, an axis of open length counted once, and its descriptor and padding."""
    return math.prod(max(1, n) for n in spec.item_shape) * spec.dtype.itemsize + 2 * wire.ALIGNMENT
