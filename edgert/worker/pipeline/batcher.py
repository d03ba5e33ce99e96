"""The micro-batcher: the thread of one request runs the whole batch.

The batcher has neither a thread nor a timer. A request that finds an engine instance idle runs it at once, in its own
thread. Requests that arrive while all instances are busy wait. When a run ends, the batcher wakes the first waiting
request as the leader of the next batch. This batch also contains the other waiting requests, up to the cap. So batching
costs a lone request nothing, and no request waits for a batch to fill. If a model leaves an axis of its items open,
only requests of one shape share a batch.

There is one exception. After a batch of several requests, their clients will soon send the next requests. So the next
leader lingers: it waits for these requests for at most a tenth of the last run's time. It stops earlier if as many
requests wait as the last batch had.

There are two priorities. High requests go first. After BYPASS_MAX batches before a low request, the oldest low request
leads. `self._idle` holds the free instances; list.pop and append are atomic, so a lone request takes no lock. A busy
instance is handed to the next leader directly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.checks.status import BatcherStatus
from edgert.engines import Session
from edgert.errors import DeadlineExceeded, EdgeRTError, EngineFailed, Overloaded
from edgert.tensors import batchable
from edgert.worker.pipeline.tuning import LINGER_SHARE, LatencyTuner

LINGER_S_MAX = 0.002
LINGER_STEP_S = 20e-6
BYPASS_MAX = 4
RELEASE_AFTER_S = 5.0  # after this time without a large run, engines may release the memory of large runs

Arrays = list[NDArray[Any]]
_new = tuple.__new__  # creates a NamedTuple faster, because it does not call the NamedTuple's Python function


class EngineAnswer(NamedTuple):
    """The model's outputs, which may be views of a whole batch's arrays. Durations are nanoseconds."""

    outputs: Arrays
    queue_ns: int
    engine_ns: int
    batch: int


class _Instance:
    """One engine session, run by the thread that holds the instance.

    A request of the reactor runs on `reactor_session`, which may be the same session. The last run had `last_count`
    requests.
    """

    __slots__ = ("arena", "last_count", "last_run_s", "reactor_run", "run", "sessions")

    def __init__(self, session: Session, reactor_session: Session) -> None:
        self.sessions = [session] if reactor_session is session else [session, reactor_session]
        self.run, self.reactor_run = session.run, reactor_session.run
        self.arena: Arrays = []
        self.last_count, self.last_run_s = 1, 0.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A waiting request. `gate` opens for an answer or an error, or if it must lead a batch on `instance`."""

    inputs: Sequence[NDArray[Any]]
    items: int
    deadline_s: float | None
    high: bool
    arrived_ns: int
    shapes: tuple[tuple[int, ...], ...] = ()  # the shapes of the request's items, if the model leaves an axis open
    waits_since_ns: int = field(default_factory=time.perf_counter_ns)
    instance: _Instance | None = None
    answer: EngineAnswer | None = None
    error: EdgeRTError | None = None
    gate: threading.Lock = field(default_factory=lambda: _closed_gate())


class Batcher:
    """Runs requests on engine sessions, several requests in one run.

    Args:
        cap: The largest number of items in one run; with 1, each request has its own run.
        queue_max: The largest number of waiting requests of each priority.
        clock: Returns seconds; deadlines are times of this clock.
        more_sessions: Sessions like `session`, which run at the same time.
        reactor_sessions: The sessions for requests of the reactor, one for each other session; empty if the reactor
            uses the other sessions.
        p95_ms: The target for the time from a request's arrival to its engine's answer; 0 sets no target.

    Attributes:
        close_reasons: The number of batches by the reason that closed them: `idle` (no other request waited), `cap`,
            `linger` (the leader waited for the last batch's clients), `deadline` (the leader waited less, because of
            its own time-out).
        runs: For each number of items in a run, the number of these runs and their engine time in ns.
    """

    def __init__(
        self,
        session: Session,
        cap: int,
        queue_max: int = 256,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        more_sessions: Sequence[Session] = (),
        reactor_sessions: Sequence[Session] = (),
        p95_ms: float = 0.0,
    ) -> None:
        self.cap = cap if batchable((*session.inputs, *session.outputs)) else 1
        self.tuner = LatencyTuner(p95_ms, self.cap) if p95_ms else None
        self.close_reasons: Counter[str] = Counter()
        self.runs: dict[int, tuple[int, int]] = {}
        self.is_open = any(-1 in spec.item_shape for spec in session.inputs)
        self._queue_max = queue_max
        self._clock, self._sleep = clock, sleep
        sessions = (*more_sessions, session)
        self._idle = list(map(_Instance, sessions, reactor_sessions or sessions))
        self.instances = len(self._idle)
        self._last = self._idle[-1]
        self._arena: Arrays = []  # only `infer_together` uses it
        self._mutex = threading.Lock()  # guards the queues
        self._high: deque[_Waiting] = deque()
        self._low: deque[_Waiting] = deque()
        self._refusal: EdgeRTError | None = None
        self._bypassed = 0  # batches in a row that went before a waiting low request
        self._large_at_s: float | None = None  # the end of the last run of several items or of an open shape

    def infer(
        self,
        inputs: Sequence[NDArray[Any]],
        items: int,
        deadline_s: float | None = None,
        high: bool = False,
        arrived_ns: int = 0,
        in_reactor: bool = False,
    ) -> EngineAnswer:
        """Answer one request; return when it is answered.

        Raises EngineFailed; also Overloaded if the queue is full, and DeadlineExceeded if the deadline passes before
        the engine can start.

        Args:
            deadline_s: The time at which the request's time-out passes, on `clock`; None if it has no time-out.
            arrived_ns: The arrival of the request, on time.perf_counter_ns; 0 for the present time.
            in_reactor: Whether the reactor serves the request.
        """
        try:
            instance = self._idle.pop()
        except IndexError:  # all instances are busy
            return self._infer_later(inputs, items, deadline_s, high, arrived_ns)
        # The hot path: one request on an instance that was idle. Each function that it calls costs cache misses.
        began_ns = time.perf_counter_ns()
        try:
            outputs = (instance.reactor_run if in_reactor else instance.run)(inputs)
            engine_ns = time.perf_counter_ns() - began_ns
            self.close_reasons["cap" if items >= self.cap > 1 else "idle"] += 1
            instance.last_count, instance.last_run_s = 1, engine_ns * 1e-9
            runs, sum_ns = self.runs.get(items, (0, 0))
            self.runs[items] = (runs + 1, sum_ns + engine_ns)
            if items > 1 or self.is_open:
                self._large_at_s = self._clock()
        except EdgeRTError:
            raise
        except Exception as error:
            raise _failed(error) from error
        finally:
            if self._low or self._high:
                self._release(instance)
            else:
                self._idle.append(instance)
                if self._low or self._high:  # a request began to wait before it could see the idle instance
                    self._wake_leader()
        if self.tuner is not None:
            self.tuner.add((began_ns + engine_ns - (arrived_ns or began_ns),))
        return _new(EngineAnswer, (outputs, 0, engine_ns, items))

    def _infer_later(
        self, inputs: Sequence[NDArray[Any]], items: int, deadline_s: float | None, high: bool, arrived_ns: int
    ) -> EngineAnswer:
        """Answer a request that found all instances busy."""
        shapes = tuple(array.shape[1:] for array in inputs) if self.is_open else ()
        request = _Waiting(inputs, items, deadline_s, high, arrived_ns or time.perf_counter_ns(), shapes)
        self._queue(request)
        if self._idle:  # an instance became idle before its thread could see this request in the queue
            self._wake_leader()
        return self._wait(request)

    def infer_together(
        self, requests: Sequence[tuple[Arrays, int]], deadline_s: float | None = None
    ) -> list[EngineAnswer]:
        """Answer requests (inputs, items) in one run. Only one thread may call this.

        Several requests have at most `cap` items in total. Raises the errors of `infer`; an error is then the answer to
        all requests.
        """
        if len(requests) == 1:
            return [self.infer(*requests[0], deadline_s)]
        total = sum(items for _, items in requests)
        whole = self._gather(self._arena, [inputs for inputs, _ in requests], total)
        outputs, queue_ns, engine_ns, _ = self.infer(whole, total, deadline_s)
        shares = _shares(outputs, [items for _, items in requests])
        return [_new(EngineAnswer, (own, queue_ns, engine_ns, total)) for own in shares]

    def close(self, error: EdgeRTError) -> None:
        """End the waiting requests with `error`, and refuse later requests. Current runs end by themselves."""
        with self._mutex:
            self._refusal = error
            waiting = [*self._high, *self._low]
            self._high.clear()
            self._low.clear()
        for request in waiting:
            request.error = error
            request.gate.release()

    def release_memory(self, sample: Callable[[], Arrays]) -> bool:
        """Let idle engines release the memory of large runs if no large run ended within RELEASE_AFTER_S.

        An engine may need to run `sample`, one item, to release memory; a request that arrives during this run waits.
        Returns whether there was memory to release.
        """
        large_at_s = self._large_at_s  # read once, because several threads may release memory
        if large_at_s is None or self._clock() - large_at_s < RELEASE_AFTER_S:
            return False
        self._large_at_s = None
        taken: list[_Instance] = []
        with contextlib.suppress(Exception):  # after a failure the memory stays; the next request reports the fault
            inputs = sample()
            taken += iter(self._idle_instance, None)
            for instance in taken:
                instance.arena.clear()
                for session in instance.sessions:
                    session.release_memory(inputs)
        for instance in taken:
            self._release(instance)
        return True

    @property
    def waiting(self) -> int:
        return len(self._high) + len(self._low)

    def status(self) -> BatcherStatus:
        tuner = None if self.tuner is None else self.tuner.status()
        return BatcherStatus(len(self._high), len(self._low), self.instances, tuner)

    def _idle_instance(self) -> _Instance | None:
        try:
            return self._idle.pop()
        except IndexError:  # another thread took the last instance
            return None

    def _queue(self, request: _Waiting) -> None:
        with self._mutex:
            if self._refusal is not None:
                raise self._refusal
            queue = self._high if request.high else self._low
            if len(queue) >= self._queue_max:
                per_request_s = self._last.last_run_s / self._last.last_count / self.instances
                raise Overloaded(
                    f"{len(queue)} requests wait for this model, the limit ([serving] queue_max): send fewer requests, or try again later",
                    retry_after_s=max(0.001, per_request_s * self.waiting),
                )
            queue.append(request)

    def _wait(self, request: _Waiting) -> EngineAnswer:
        if request.deadline_s is None:
            request.gate.acquire()
        elif not request.gate.acquire(timeout=max(0.0, request.deadline_s - self._clock())):
            with self._mutex:
                queue = self._high if request.high else self._low
                if request in queue:
                    queue.remove(request)
                    raise late_error()
            request.gate.acquire()  # a leader has taken the request, and will answer it
        if request.error is not None:
            raise request.error
        if request.answer is not None:
            return request.answer
        return self._lead(request)

    def _lead(self, own: _Waiting) -> EngineAnswer:
        """Run a batch with `own` in it, answer the others, and release the instance."""
        instance = own.instance
        assert instance is not None  # the thread that woke this request gave it one
        try:
            cap = self.cap if self.tuner is None else self.tuner.cap
            batch = [own]
            reason = "idle"
            if cap > 1:
                reason = self._linger(instance, own, cap)
                batch += self._take_waiting(cap - own.items, own.shapes)
            self.close_reasons["cap" if _items(batch) >= cap > 1 else reason] += 1
            self._run(instance, batch)
        finally:
            self._release(instance)
        if own.error is not None:
            raise own.error
        assert own.answer is not None  # _run answers every request or gives it an error
        return own.answer

    def _linger(self, instance: _Instance, own: _Waiting, cap: int) -> str:
        """Wait for the clients of the instance's last run.

        Returns the reason that closes the batch, unless the batch reaches the cap.
        """
        cohort = min(instance.last_count, cap)
        share = LINGER_SHARE if self.tuner is None else self.tuner.linger_share
        if cohort <= 1 or self.waiting + 1 >= cohort or not share:
            return "idle"
        now_s, reason = self._clock(), "linger"
        until_s = now_s + min(share * instance.last_run_s, LINGER_S_MAX)
        if own.deadline_s is not None and own.deadline_s - instance.last_run_s < until_s:
            until_s, reason = own.deadline_s - instance.last_run_s, "deadline"
        while self.waiting + 1 < cohort and self._clock() < until_s:
            self._sleep(LINGER_STEP_S)
        return reason

    def _take_waiting(self, room: int, shapes: tuple[tuple[int, ...], ...]) -> list[_Waiting]:
        """Take waiting requests of `shapes` that fit into `room` items: high priority first, then the oldest.

        Requests of other shapes keep their places.
        """
        taken: list[_Waiting] = []
        with self._mutex:
            for queue in (self._high, self._low):
                others = []
                while queue and room > 0:
                    if self._refused_if_late(queue[0]):
                        queue.popleft()
                        continue
                    if queue[0].shapes != shapes:
                        others.append(queue.popleft())
                        continue
                    if queue[0].items > room:
                        room = 0  # this request goes first in the next batch; no later request runs before it
                        break
                    taken.append(queue.popleft())
                    room -= taken[-1].items
                queue.extendleft(reversed(others))
            if taken and not taken[-1].high:
                self._bypassed = 0
        return taken

    def _run(self, instance: _Instance, batch: list[_Waiting]) -> None:
        start_ns = time.perf_counter_ns()
        items = _items(batch)
        try:
            several = len(batch) > 1
            inputs = (
                self._gather(instance.arena, [waiting.inputs for waiting in batch], items)
                if several
                else batch[0].inputs
            )
            outputs = instance.run(inputs)
        except EdgeRTError as error:
            self._fail(batch, error)
            return
        except Exception as error:  # noqa: BLE001  # a failure of the engine must not leave the other requests waiting
            self._fail(batch, _failed(error))
            return
        ended_ns = time.perf_counter_ns()
        engine_ns = ended_ns - start_ns
        instance.last_count, instance.last_run_s = len(batch), engine_ns * 1e-9
        runs, sum_ns = self.runs.get(items, (0, 0))
        self.runs[items] = (runs + 1, sum_ns + engine_ns)
        if items > 1 or self.is_open:
            self._large_at_s = self._clock()
        shares = _shares(outputs, [waiting.items for waiting in batch]) if several else [outputs]
        for request, own in zip(batch, shares, strict=True):
            request.answer = EngineAnswer(own, start_ns - request.waits_since_ns, engine_ns, items)
        for request in batch[1:]:
            request.gate.release()
        if self.tuner is not None:
            self.tuner.add([ended_ns - request.arrived_ns for request in batch])

    def _fail(self, batch: list[_Waiting], error: EdgeRTError) -> None:
        for request in batch:
            request.error = error
        for request in batch[1:]:
            request.gate.release()

    def _gather(self, arena: Arrays, requests: Sequence[Sequence[NDArray[Any]]], items: int) -> Arrays:
        """Return the joined inputs of `requests`, in the arrays of `arena`, which are created once."""
        if self.is_open:
            return [np.concatenate(arrays) for arrays in zip(*requests, strict=True)]
        if not arena:
            arena += [np.empty((self.cap, *a.shape[1:]), a.dtype) for a in requests[0]]
        for i, whole in enumerate(arena):
            np.concatenate([inputs[i] for inputs in requests], out=whole[:items])
        return [whole[:items] for whole in arena]

    def _release(self, instance: _Instance) -> None:
        """Hand the instance to the next leader; if no request waits, leave the instance idle."""
        with self._mutex:
            leader = self._next_leader()
            if leader is not None:
                leader.instance = instance
                leader.gate.release()
                return
        self._idle.append(instance)
        if self._low or self._high:  # a request began to wait before it could see the idle instance
            self._wake_leader()

    def _wake_leader(self) -> None:
        """Hand an idle instance, if there is one, to the next leader."""
        instance = self._idle_instance()
        if instance is not None:
            self._release(instance)

    def _next_leader(self) -> _Waiting | None:
        """Return the next waiting request: high before low, up to BYPASS_MAX times. Refuse late requests."""
        while self._high or self._low:
            low_leads = not self._high or (self._bypassed >= BYPASS_MAX and bool(self._low))
            leader = (self._low if low_leads else self._high).popleft()
            if self._refused_if_late(leader):
                continue
            self._bypassed = 0 if low_leads or not self._low else self._bypassed + 1
            return leader
        return None

    def _refused_if_late(self, request: _Waiting) -> bool:
        """Refuse the request if its time-out has passed; return whether it is refused."""
        if request.deadline_s is None or self._clock() < request.deadline_s:
            return False
        request.error = late_error()
        request.gate.release()
        return True


def _shares(outputs: Arrays, counts: Sequence[int]) -> Iterator[Arrays]:
    """Yield each request's part of a batch's outputs, as views; `counts` are the numbers of items."""
    at = 0
    for items in counts:
        yield [array[at : at + items] for array in outputs]
        at += items


def _items(batch: list[_Waiting]) -> int:
    return sum(request.items for request in batch)


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _failed(error: Exception) -> EngineFailed:
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")


def late_error() -> DeadlineExceeded:
    """Return the error for a request whose time-out passed before its run began."""
    return DeadlineExceeded(
        "the request's time-out passed while the request waited for the engine: send fewer requests, or allow more time"
    )
