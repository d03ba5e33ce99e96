"""The micro-batcher: leader and followers, no thread of its own, no timer.

A request that finds the engine idle runs it at once, in its own thread. What arrives while the engine is
busy parks; when the run ends, the first parked request is woken as the next leader and takes the others
along, up to the cap. So a lone request pays nothing for batching, and a batch is never waited for: it forms
out of what came in meanwhile.

One exception: after a batch larger than one, its requesters are about to ask again. The next leader lingers
for them, at most a tenth of the last run's time, and only while fewer wait than took part in that batch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.engines import Session
from edgert.errors import DeadlineExceeded, EdgeRTError, EngineFailed, Overloaded
from edgert.tensors import batchable

LINGER_SHARE = 0.1
LINGER_S_MAX = 0.002
LINGER_STEP_S = 20e-6

Arrays = list[NDArray[Any]]


class Answer(NamedTuple):
    """`outputs` may be views of a whole batch's arrays. Durations are nanoseconds."""

    outputs: Arrays
    queue_ns: int
    engine_ns: int
    batch: int


class _Ticket:
    """A parked request. `gate` opens when it has an answer or an error, or is to lead."""

    __slots__ = ("answer", "came_ns", "deadline_s", "error", "gate", "inputs", "rows")

    def __init__(self, inputs: Sequence[NDArray[Any]], rows: int, deadline_s: float | None, came_ns: int) -> None:
        self.inputs, self.rows, self.deadline_s, self.came_ns = inputs, rows, deadline_s, came_ns
        self.answer: Answer | None = None
        self.error: EdgeRTError | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Batcher:
    """Runs requests on `session`, at most `cap` items at a time; `cap` 1 runs each request by itself.

    At most `queue_max` requests wait. `clock` gives seconds and must be the one that deadlines are stated in.
    `closed` counts the batches by what closed them: `idle` (nobody else waited), `cap`, `linger` (waited
    for the cohort and took who had come).
    """

    def __init__(
        self,
        session: Session,
        cap: int,
        queue_max: int = 256,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session = session
        self.cap = cap if batchable(session.inputs) and batchable(session.outputs) else 1
        self._queue_max = queue_max
        self._clock, self._sleep = clock, sleep
        self._mutex = threading.Lock()  # guards the queue
        self._engine = threading.Lock()  # held by whoever runs the session; passed on, not released, to a next leader
        self._queue: deque[_Ticket] = deque()
        self._last_rows, self._last_run_s = 1, 0.0
        self._arena: Arrays = []
        self.closed: Counter[str] = Counter()

    def infer(self, inputs: Sequence[NDArray[Any]], rows: int, deadline_s: float | None = None) -> Answer:
        """Answer one request of `rows` items; blocks until it is answered.

        Raises Overloaded when the queue is full, DeadlineExceeded when `deadline_s` (on `clock`) passes
        before the engine could start, EngineFailed.
        """
        if self._engine.acquire(False):
            return self._run_alone(inputs, rows)
        ticket = self._park(inputs, rows, deadline_s)
        if self._engine.acquire(False):  # it became free before the ticket could be seen
            self._pass_on()
        return self._wait(ticket)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _run_alone(self, inputs: Sequence[NDArray[Any]], rows: int) -> Answer:
        """The engine was idle: nothing to gather, nobody to answer. The hot path."""
        began_ns = time.perf_counter_ns()
        try:
            outputs = self._session.run(inputs)
            engine_ns = time.perf_counter_ns() - began_ns
            self._last_rows, self._last_run_s = rows, engine_ns * 1e-9
            self.closed["idle"] += 1
        except EdgeRTError:
            raise
        except Exception as error:
            raise _failed(error) from error
        finally:
            self._free_engine()
        return Answer(outputs, 0, engine_ns, rows)

    def _park(self, inputs: Sequence[NDArray[Any]], rows: int, deadline_s: float | None) -> _Ticket:
        with self._mutex:
            if len(self._queue) >= self._queue_max:
                per_item_s = self._last_run_s / max(1, self._last_rows)
                raise Overloaded(
                    f"{len(self._queue)} requests wait for this model already, its limit; send less or try again later",
                    retry_after_s=max(0.001, per_item_s * len(self._queue)),
                )
            ticket = _Ticket(inputs, rows, deadline_s, time.perf_counter_ns())
            self._queue.append(ticket)
            return ticket

    def _wait(self, ticket: _Ticket) -> Answer:
        if ticket.deadline_s is None:
            ticket.gate.acquire()
        elif not ticket.gate.acquire(timeout=max(0.0, ticket.deadline_s - self._clock())):
            with self._mutex:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                    raise _late()
            ticket.gate.acquire()  # a leader has taken it: the answer is on its way
        if ticket.error is not None:
            raise ticket.error
        if ticket.answer is not None:
            return ticket.answer
        return self._lead(ticket)

    def _lead(self, own: _Ticket) -> Answer:
        """Run a batch with `own` in it, answer the others, and hand the engine on."""
        try:
            batch = [own]
            reason = "idle"
            if self.cap > 1:
                reason = self._linger(own)
                batch += self._take(self.cap - own.rows)
            self.closed["cap" if _rows(batch) >= self.cap > 1 else reason] += 1
            self._run(batch)
        finally:
            self._free_engine()
        if own.error is not None:
            raise own.error
        assert own.answer is not None  # _run answers every ticket or gives it an error
        return own.answer

    def _linger(self, own: _Ticket) -> str:
        cohort = min(self._last_rows, self.cap)
        if cohort <= 1 or len(self._queue) + own.rows >= cohort:
            return "idle"
        until = self._clock() + min(LINGER_SHARE * self._last_run_s, LINGER_S_MAX)
        while len(self._queue) + own.rows < cohort and self._clock() < until:
            self._sleep(LINGER_STEP_S)
        return "linger"

    def _take(self, room: int) -> list[_Ticket]:
        """Parked requests, in order of arrival, that fit into `room` items; the expired ones are refused."""
        taken = []
        with self._mutex:
            while self._queue and room > 0:
                ticket = self._queue[0]
                if ticket.deadline_s is not None and self._clock() >= ticket.deadline_s:
                    self._queue.popleft()
                    ticket.error = _late()
                    ticket.gate.release()
                    continue
                if ticket.rows > room:
                    break
                taken.append(self._queue.popleft())
                room -= ticket.rows
        return taken

    def _run(self, batch: list[_Ticket]) -> None:
        start_ns = time.perf_counter_ns()
        rows = _rows(batch)
        try:
            inputs = batch[0].inputs if len(batch) == 1 else self._gather(batch, rows)
            outputs = self._session.run(inputs)
        except EdgeRTError as error:
            self._fail(batch, error)
            return
        except Exception as error:  # noqa: BLE001  # an engine's own failure must not strand the parked
            self._fail(batch, _failed(error))
            return
        engine_ns = time.perf_counter_ns() - start_ns
        self._last_rows, self._last_run_s = rows, engine_ns / 1e9
        if len(batch) == 1:
            batch[0].answer = Answer(outputs, start_ns - batch[0].came_ns, engine_ns, rows)
            return
        at = 0
        for ticket in batch:
            own = [array[at : at + ticket.rows] for array in outputs]
            ticket.answer = Answer(own, start_ns - ticket.came_ns, engine_ns, rows)
            at += ticket.rows
        for ticket in batch[1:]:
            ticket.gate.release()

    def _fail(self, batch: list[_Ticket], error: EdgeRTError) -> None:
        for ticket in batch:
            ticket.error = error
        for ticket in batch[1:]:
            ticket.gate.release()

    def _gather(self, batch: list[_Ticket], rows: int) -> Arrays:
        """The batch's inputs one after the other, in arrays that are kept between runs."""
        if not self._arena:
            self._arena = [np.empty((self.cap, *a.shape[1:]), a.dtype) for a in batch[0].inputs]
        for i, whole in enumerate(self._arena):
            np.concatenate([ticket.inputs[i] for ticket in batch], out=whole[:rows])
        return [whole[:rows] for whole in self._arena]

    def _free_engine(self) -> None:
        """The run is over: wake the next leader, or leave the engine idle."""
        if self._queue:
            self._pass_on()
            return
        self._engine.release()
        if self._queue and self._engine.acquire(False):  # somebody parked just before the release
            self._pass_on()

    def _pass_on(self) -> None:
        """Whoever holds the engine gives it to the first that waits; the expired ones are refused."""
        while True:
            with self._mutex:
                while self._queue:
                    leader = self._queue.popleft()
                    if leader.deadline_s is not None and self._clock() >= leader.deadline_s:
                        leader.error = _late()
                        leader.gate.release()
                        continue
                    leader.gate.release()
                    return
            self._engine.release()
            if not (self._queue and self._engine.acquire(False)):
                return


def _rows(batch: list[_Ticket]) -> int:
    return sum(ticket.rows for ticket in batch)


def _failed(error: Exception) -> EngineFailed:
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")


def _late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the request's time-out passed while it waited for the engine; send less or allow more time"
    )
