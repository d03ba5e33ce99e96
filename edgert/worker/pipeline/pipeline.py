"""One request through the model: cache -> preprocess -> batcher and engine -> postprocess.

Each stage takes arrays and returns arrays; its time is measured in nanoseconds.

The prediction cache has the client's bytes as its key and the client's answer as its value. So a hit needs neither the
decoding of an image nor the suppression of boxes. The near cache comes after preprocessing: it compares the model's
input and keeps the model's own outputs. It cannot keep the client's answer, because in an image of another size, the
same boxes have other coordinates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.checks import golden_samples as golden
from edgert.errors import RequestError
from edgert.machine import return_free_memory
from edgert.processing.images.placement import Placement
from edgert.processing.images.preprocess import Preprocessor
from edgert.processing.postprocess import Postprocessor
from edgert.processing.preprocessors import InputPreprocessor, preprocessor
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.processing.text import TextPreprocessor
from edgert.protocol import wire
from edgert.tensors import StageTimes
from edgert.versions.installed import read_file
from edgert.worker.loading.model import LoadedModel
from edgert.worker.pipeline.app_tensors import AppTensors, ModelInputs
from edgert.worker.pipeline.batcher import Batcher, EngineAnswer
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.near_cache import NearCache
from edgert.worker.pipeline.session_memory import Memory, MemoryForm
from edgert.worker.shadow.shadow import Shadow

Arrays = list[NDArray[Any]]
_new = tuple.__new__  # creates a NamedTuple faster, because it does not call the NamedTuple's Python function


class Answer(NamedTuple):
    """The content of a RESULT frame; `outputs[i]` is tensor `numbers[i]`."""

    outputs: Arrays
    numbers: list[int]
    batch: int
    flags: int
    stages: StageTimes


@dataclass(slots=True)
class _Request:
    """One request in progress. Durations are in ns.

    Attributes:
        arrays: First the client's arrays, then the model's inputs.
        raw: Whether `arrays` contain an image, a signal or a text for preprocessing.
        memory: The session's memory, first before the request, then after it; None if the request has no session.
        waited_ns: The time between the request's arrival and its decoding.
    """

    arrays: Arrays
    items: int
    raw: bool
    tag: bytes
    deadline_s: float | None
    high: bool
    arrived_ns: int
    memory: Memory | None = None
    placements: list[Placement] | None = None
    windows: list[int] | None = None
    waited_ns: int = 0
    in_reactor: bool = False
    preprocess_ns: int = 0
    postprocess_ns: int = 0


class Pipeline:
    """Serves one loaded model. Many threads at once may call `infer`."""

    def __init__(
        self,
        model: LoadedModel,
        batcher: Batcher,
        cache: PredictionCache,
        near: NearCache | None = None,
        shadows: Sequence[Shadow] = (),
    ) -> None:
        manifest = model.version.manifest
        self._model = model
        self._batcher = batcher
        self._cache = cache
        self._near = near
        self._shadows = tuple(shadows)
        self._padder = golden.padder_of(model.version)
        self._pre: InputPreprocessor | None = None
        if (rule := manifest.input_rule) is not None:
            self._pre = preprocessor(rule, manifest.app_inputs, lambda path: read_file(model.version, path))
        self._post: Postprocessor | None = None
        if any((manifest.classify, manifest.detect, manifest.ctc, manifest.embed)):
            self._post = Postprocessor(manifest)
        self.memory_form = MemoryForm(manifest, self._pre)
        self.tensors = AppTensors(manifest, self._pre, self._post, self.memory_form, self._padder)
        self._run_engine = batcher.infer if self._padder is None and not shadows else self._run_padded_and_shadowed
        self._in_turn = self.memory_form.in_turn
        self._engine_only = self._post is None and not self._in_turn
        self._rule_input = self.tensors.rule_input
        self._sent_outputs = self.tensors.sent_outputs
        self._numbers = self.tensors.numbers

    def release_memory(self) -> None:
        """Release memory that requests of many items took. Call this for idle clients and once per window."""
        if self._batcher.release_memory(lambda: next(golden.samples(self._model.version))):
            return_free_memory()

    def needs_only_engine(self, inputs: ModelInputs, flags: int) -> bool:
        """Return whether a request needs no cache, no preprocessing and no postprocessing."""
        cached = not flags & wire.FLAG_NO_CACHE and (self._cache.on or self._near is not None)
        return not cached and not inputs.raw and self._engine_only

    def infer(
        self,
        inputs: ModelInputs,
        flags: int,
        arrived_ns: int,
        deadline_s: float | None,
        waited_ns: int = 0,
        in_reactor: bool = False,
    ) -> Answer:
        """Answer one request. Raises EdgeRTError.

        Args:
            deadline_s: The time at which the request's time-out passes; None if it has no time-out.
            waited_ns: The time between the arrival and the decoding of the request, a part of its time in the queue.
            in_reactor: Whether the reactor serves the request, on its own engine sessions.
        """
        began_ns = time.perf_counter_ns()
        high = flags & wire.FLAG_HIGH_PRIORITY != 0
        cached = not flags & wire.FLAG_NO_CACHE and (self._cache.on or self._near is not None)
        if not cached and not inputs.raw and self._engine_only:  # `needs_only_engine`, without a call
            engine = self._run_engine(inputs.arrays, inputs.items, deadline_s, high, arrived_ns, in_reactor)
            outputs, queue_ns, engine_ns, batch = engine
            decode_us, queue_us = (began_ns - arrived_ns - waited_ns) // 1000, (queue_ns + waited_ns) // 1000
            stages = _new(StageTimes, (decode_us, 0, 0, queue_us, engine_ns // 1000, 0))
            return _new(Answer, (outputs, self._numbers[0], batch, 0, stages))
        request = _Request(*inputs, deadline_s, high, arrived_ns, waited_ns=waited_ns, in_reactor=in_reactor)
        cache_ns = hit_flags = 0
        if not cached:
            engine = self._run(request)
        else:
            near = self._near is not None and request.items == 1
            engine, hit_flags = (self._answer_with_near_cache if near else self._answer_with_cache)(request)
            around_ns = engine.queue_ns + engine.engine_ns + request.preprocess_ns + request.postprocess_ns
            cache_ns = time.perf_counter_ns() - began_ns - around_ns
        return self._answer(request, engine, began_ns, cache_ns, hit_flags)

    def infer_in_session(
        self, inputs: ModelInputs, flags: int, arrived_ns: int, deadline_s: float | None, memory: Memory
    ) -> tuple[Answer, Memory]:
        """Answer a request of the session with `memory`, without caches; also return its new memory."""
        began_ns = time.perf_counter_ns()
        high = flags & wire.FLAG_HIGH_PRIORITY != 0
        request = _Request(*inputs, deadline_s, high, arrived_ns, memory)
        answer = self._answer(request, self._run(request), began_ns)
        return answer, request.memory or memory

    def _answer(
        self, request: _Request, engine: EngineAnswer, began_ns: int, cache_ns: int = 0, hit_flags: int = 0
    ) -> Answer:
        stages = StageTimes(
            decode_us=(began_ns - request.arrived_ns - request.waited_ns) // 1000,
            preprocess_us=request.preprocess_ns // 1000,
            cache_us=cache_ns // 1000,
            queue_us=(engine.queue_ns + request.waited_ns) // 1000,
            engine_us=engine.engine_ns // 1000,
            postprocess_us=request.postprocess_ns // 1000,
        )
        return Answer(engine.outputs, self._numbers[request.raw], engine.batch, hit_flags, stages)

    def infer_together(
        self, requests: Sequence[ModelInputs], times_ns: Sequence[tuple[int, int, int]], deadline_s: float | None
    ) -> list[Answer]:
        """Answer requests that need only the engine, in one run. Only one thread may call this.

        Raises EdgeRTError, which is then the answer to all requests.

        Args:
            requests: The requests. Several requests have in total at most as many items as the batcher's cap.
            times_ns: For each request, the times when it arrived, was received and was decoded.
            deadline_s: The time at which the last of the requests' time-outs passes; None if there is no time-out.
        """
        began_ns = time.perf_counter_ns()
        engines = self._batcher.infer_together([(request.arrays, request.items) for request in requests], deadline_s)
        answers = []
        for request, engine, (arrived_ns, received_ns, read_ns) in zip(requests, engines, times_ns, strict=True):
            for shadow in self._shadows:
                shadow.offer(request.arrays, engine.outputs)
            outputs, queue_ns, engine_ns, batch = engine
            decode_us = (read_ns - received_ns) // 1000
            queue_us = (received_ns - arrived_ns + began_ns - read_ns + queue_ns) // 1000
            stages = _new(StageTimes, (decode_us, 0, 0, queue_us, engine_ns // 1000, 0))
            answers.append(_new(Answer, (outputs, self._numbers[0], batch, 0, stages)))
        return answers

    def _run(self, request: _Request) -> EngineAnswer:
        """Return the client's answer, computed by the engine."""
        self._preprocess(request)
        if not request.items:  # the request completes no window of its session
            empty = [np.empty((0, *(max(0, n) for n in spec.item_shape)), spec.dtype) for spec in self.tensors.outputs]
            return EngineAnswer([empty[i] for i in self._numbers[request.raw]], 0, 0, 0)
        return self._postprocessed(request, self._model_answer(request))

    def _model_answer(self, request: _Request) -> EngineAnswer:
        """Return the model's own outputs for a request after preprocessing."""
        if self._in_turn:
            return self._run_in_turn(request)
        return self._run_engine(
            request.arrays, request.items, request.deadline_s, request.high, request.arrived_ns, request.in_reactor
        )

    def _run_in_turn(self, request: _Request) -> EngineAnswer:
        """Run the items one after the other, each with the state that the item before it produced."""
        form, memory = self.memory_form, request.memory or self.memory_form.first
        state, answers = memory.state, []
        for i in range(request.items):
            arrays = form.with_state([array[i : i + 1] for array in request.arrays], state)
            answers.append(self._run_engine(arrays, 1, request.deadline_s, request.high, request.arrived_ns))
            state = form.state_of(answers[-1].outputs)
        if request.memory is not None:
            request.memory = memory._replace(state=state)
        if len(answers) == 1:
            return answers[0]
        outputs = [np.concatenate(parts) for parts in zip(*(answer.outputs for answer in answers), strict=True)]
        queue_ns, engine_ns = sum(answer.queue_ns for answer in answers), sum(answer.engine_ns for answer in answers)
        return EngineAnswer(outputs, queue_ns, engine_ns, max(answer.batch for answer in answers))

    def _run_padded_and_shadowed(
        self,
        arrays: Arrays,
        items: int,
        deadline_s: float | None,
        high: bool,
        arrived_ns: int,
        in_reactor: bool = False,
    ) -> EngineAnswer:
        """Run the engine like `Batcher.infer`, with padding before the run and shadows after it."""
        if self._padder is None:
            answer = self._batcher.infer(arrays, items, deadline_s, high, arrived_ns, in_reactor)
        else:
            length, padded = self._padder.length(arrays), self._padder.padded(arrays)
            answer = self._batcher.infer(padded, items, deadline_s, high, arrived_ns)
            answer = answer._replace(outputs=self._padder.cut(answer.outputs, length))
        for shadow in self._shadows:
            shadow.offer(arrays, answer.outputs)
        return answer

    def _preprocess(self, request: _Request) -> None:
        if not request.raw:
            return
        assert self._pre is not None  # a raw input has a preprocessor
        began_ns = time.perf_counter_ns()
        inputs, rule_input = self.tensors.inputs, self._rule_input
        given = dict(zip(self.tensors.sent_inputs, request.arrays, strict=True))
        arrays: dict[int, NDArray[Any]] = {}
        if isinstance(self._pre, TextPreprocessor):
            tokens = self._pre(given[rule_input])
            arrays = {i: tokens[spec.name] for i, spec in enumerate(inputs) if spec.name in tokens}
        elif request.memory is not None and (signals := self.memory_form.pre) is not None:
            arrays[rule_input] = self._next_windows(request, signals)
        elif isinstance(self._pre, Preprocessor):
            arrays[rule_input], request.placements = self._pre(given[rule_input], request.deadline_s)
        else:
            arrays[rule_input], request.windows = self._pre(given[rule_input], request.deadline_s)
            if self.memory_form.first.state and len(request.windows or ()) > 1:
                raise RequestError("the model's state passes from window to window: send one signal in each request")
        request.arrays = [arrays[i] if i in arrays else given[i] for i in range(len(inputs))]
        # A signal may contain several windows. In a session, a signal may also complete no window.
        request.items = self.tensors.items(request.arrays) if len(arrays[rule_input]) else 0
        request.preprocess_ns = time.perf_counter_ns() - began_ns

    def _next_windows(self, request: _Request, signals: SignalPreprocessor) -> NDArray[Any]:
        """Return the model's tensor for the windows that a session's request completes: none, one or several."""
        assert request.memory is not None  # the caller has checked
        windows, held, skip = signals.next_windows(
            request.arrays[self._rule_input], request.memory.held, request.memory.skip
        )
        request.memory = request.memory._replace(held=held, skip=skip)
        request.windows = [len(windows)]
        return signals.features(windows) if len(windows) else windows

    def _postprocessed(self, request: _Request, answer: EngineAnswer) -> EngineAnswer:
        """Return the outputs to send: outputs of the model, and outputs that the manifest's rules compute."""
        if self._engine_only:
            return answer
        began_ns, computed = time.perf_counter_ns(), answer.outputs
        if self._post is not None:
            memory = request.memory
            before = None if memory is None else memory.shares
            computed = self._post(
                computed, request.placements, request.arrays, self._rule_input, request.windows, before
            )
            if memory is not None and before is not None and request.windows is not None:
                request.memory = memory._replace(shares=self._post.last_shares(answer.outputs, before))
        sent = [computed[i] for i in self._sent_outputs[request.raw]]
        request.postprocess_ns = time.perf_counter_ns() - began_ns
        return answer._replace(outputs=sent)

    def _answer_with_cache(self, request: _Request) -> tuple[EngineAnswer, int]:
        """Return the answer, and its flags: FLAG_CACHE_HIT if the answer needed no run of its own."""
        cache, now = self._cache, time.perf_counter_ns
        began_ns = now()
        key = cache.key(request.arrays, request.tag)
        outputs = cache.get(key, began_ns)
        if outputs is not None:
            return EngineAnswer(outputs, 0, 0, 0), wire.FLAG_CACHE_HIT
        lookup_ended_ns = now()
        runs: list[EngineAnswer] = []
        run_ns = 0

        def run_engine() -> Arrays:
            nonlocal run_ns
            run_began_ns = now()
            runs.append(self._run(request))
            run_ns = now() - run_began_ns
            return runs[0].outputs

        outputs, hit = cache.get_or_run(key, run_engine, request.deadline_s)
        flags = wire.FLAG_CACHE_HIT if hit else 0
        if not runs:
            cache.count_lookup(True, lookup_ended_ns - began_ns, 0)  # excludes the wait for another request's run
            return EngineAnswer(outputs, 0, 0, 0), flags
        answer = runs[0]
        own_ns = answer.engine_ns * request.items // max(1, answer.batch)
        cache.count_lookup(False, now() - began_ns - run_ns, own_ns + request.preprocess_ns + request.postprocess_ns)
        return answer._replace(outputs=outputs), flags

    def _answer_with_near_cache(self, request: _Request) -> tuple[EngineAnswer, int]:
        """Return the answer and its flags, like `_answer_with_cache`, but from the near cache.

        If the hit is sampled, the engine answers too, and the cache compares the two answers.
        """
        cache = self._near
        assert cache is not None  # the caller has checked
        self._preprocess(request)
        lookup = cache.look_up(request.arrays[0]) if cache.on and request.items == 1 else None
        if lookup is not None and lookup.outputs is not None and not lookup.sampled:
            hit = self._postprocessed(request, EngineAnswer(lookup.outputs, 0, 0, 0))
            return hit, wire.FLAG_CACHE_HIT | wire.FLAG_NEAR_HIT
        answer = self._model_answer(request)
        if lookup is not None and lookup.sampled:
            cache.count_agreement(lookup, answer.outputs)
        elif lookup is not None:
            cache.keep(lookup, answer.outputs)
        return self._postprocessed(request, answer), 0
