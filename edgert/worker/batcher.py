"""The micro-batcher: leaders and followers, no thread of its own, no timer.

A request that finds an engine idle runs it at once, in its own thread. What arrives while it is busy parks;
when the run ends, the first parked request is woken as the next leader and takes the others along, up to the
cap. So a lone request pays nothing for batching, and a batch is never waited for: it forms out of what came in
meanwhile.

One exception: after a batch of more than one request, its requesters are about to ask again. The next leader
lingers for them, at most a tenth of the last run's time, and only while fewer wait than took part in that batch.

There are two classes. What is of high priority is taken first; a low one is passed over by at most BYPASS_MAX
batches, then the oldest of them leads. An engine is a slot: `self._idle` holds those free, and list.pop and
append are atomic, so no lock is taken for a lone request. A busy slot is handed to the next leader directly.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.checks.status import BatcherStatus
from edgert.engines import Session
from edgert.errors import DeadlineExceeded, EdgeRTError, EngineFailed, Overloaded
from edgert.tensors import TensorSpec, batchable
from edgert.worker.tuning import LINGER_SHARE, LatencyTuner

LINGER_S_MAX = 0.002
LINGER_STEP_S = 20e-6
BYPASS_MAX = 4

Arrays = list[NDArray[Any]]
_new = tuple.__new__  # a named tuple's own constructor is a Python function that calls it


class Answer(NamedTuple):
    """`outputs` may be views of a whole batch's arrays. Durations are nanoseconds."""

    outputs: Arrays
    queue_ns: int
    engine_ns: int
    batch: int


class _Slot:
    """One engine session: whoever holds the slot may run it. `last_count` requests were in its last run."""

    __slots__ = ("arena", "last_count", "last_run_s", "run")

    def __init__(self, session: Session) -> None:
        self.run = session.run
        self.arena: Arrays = []
        self.last_count, self.last_run_s = 1, 0.0


class _Ticket:
    """A parked request. `gate` opens when it has an answer or an error, or is to lead on `slot`."""

    __slots__ = ("answer", "came_ns", "deadline_s", "error", "gate", "high", "inputs", "parked_ns", "rows", "slot")

    def __init__(
        self, inputs: Sequence[NDArray[Any]], rows: int, deadline_s: float | None, high: bool, came_ns: int
    ) -> None:
        self.inputs, self.rows, self.deadline_s, self.high = inputs, rows, deadline_s, high
        self.parked_ns = time.perf_counter_ns()
        self.came_ns = came_ns or self.parked_ns
        self.slot: _Slot | None = None
        self.answer: Answer | None = None
        self.error: EdgeRTError | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Batcher:
    """Runs requests on `session` and `more_sessions` (more of the same), at most `cap` items at a time.

    `cap` 1 runs each request by itself. At most `queue_max` requests of each class wait. `p95_ms` is a target for
    the time from a request's arrival to its engine's answer; 0 sets none. `clock` gives seconds and must be the one
    that deadlines are stated in.

    `closed` counts the batches by what closed them: `idle` (nobody else waited), `cap`, `linger` (waited for the
    cohort and took who had come), `deadline` (would have waited, but for the leader's time-out).
    """

    def __init__(
        self,
        session: Session,
        cap: int,
        queue_max: int = 256,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        more_sessions: Sequence[Session] = (),
        p95_ms: float = 0.0,
    ) -> None:
        self.cap = cap if can_batch(session.inputs, session.outputs) else 1
        self.tuner = LatencyTuner(p95_ms, self.cap) if p95_ms else None
        self.closed: Counter[str] = Counter()
        self.runs: dict[int, tuple[int, int]] = {}  # items in a run: how many such runs, their engine time in ns
        self._queue_max = queue_max
        self._clock, self._sleep = clock, sleep
        self._idle = [_Slot(one) for one in (*more_sessions, session)]
        self.instances = len(self._idle)
        self._last = self._idle[-1]
        self._arena: Arrays = []  # of `infer_together`
        self._mutex = threading.Lock()  # guards the queues
        self._high: deque[_Ticket] = deque()
        self._low: deque[_Ticket] = deque()
        self._refusal: EdgeRTError | None = None
        self._bypassed = 0  # batches in a row that passed a waiting low request over

    def infer(
        self,
        inputs: Sequence[NDArray[Any]],
        rows: int,
        deadline_s: float | None = None,
        high: bool = False,
        came_ns: int = 0,
    ) -> Answer:
        """Answer one request of `rows` items; blocks until it is answered.

        `came_ns` is when it arrived, on time.perf_counter_ns (0: now). Raises Overloaded when the queue is full,
        DeadlineExceeded when `deadline_s` (on `clock`) passes before the engine could start, EngineFailed.
        """
        if self._idle:
            try:
                slot = self._idle.pop()
            except IndexError:  # another thread took it
                pass
            else:
                return self._run_alone(slot, inputs, rows, came_ns)
        ticket = self._park(_Ticket(inputs, rows, deadline_s, high, came_ns))
        if self._idle:  # one became free before the ticket could be seen
            self._rouse()
        return self._wait(ticket)

    def infer_together(self, requests: Sequence[tuple[Arrays, int]], deadline_s: float | None = None) -> list[Answer]:
        """Answer requests (inputs, rows), one or several of at most `cap` items, in one run; for one thread only.

        Raises as `infer`, for all of them.
        """
        if len(requests) == 1:
            return [self.infer(*requests[0], deadline_s)]
        total = sum(rows for _, rows in requests)
        whole = self._gather(self._arena, [inputs for inputs, _ in requests], total)
        outputs, queue_ns, engine_ns, _ = self.infer(whole, total, deadline_s)
        shares = _shares(outputs, [rows for _, rows in requests])
        return [_new(Answer, (own, queue_ns, engine_ns, total)) for own in shares]

    def close(self, error: EdgeRTError) -> None:
        """Hand back what waits, with `error`, and let nothing wait any more. What runs ends by itself."""
        with self._mutex:
            self._refusal = error
            waiting = [*self._high, *self._low]
            self._high.clear()
            self._low.clear()
        for ticket in waiting:
            ticket.error = error
            ticket.gate.release()

    @property
    def waiting(self) -> int:
        return len(self._high) + len(self._low)

    def status(self) -> BatcherStatus:
        tuner = None if self.tuner is None else self.tuner.status()
        return BatcherStatus(len(self._high), len(self._low), self.instances, tuner)

    def _run_alone(self, slot: _Slot, inputs: Sequence[NDArray[Any]], rows: int, came_ns: int) -> Answer:
        """An engine was idle: nothing to gather, nobody to answer. The hot path."""
        began_ns = time.perf_counter_ns()
        try:
            outputs = slot.run(inputs)
            engine_ns = time.perf_counter_ns() - began_ns
            slot.last_count, slot.last_run_s = 1, engine_ns * 1e-9
            self.closed["cap" if rows >= self.cap > 1 else "idle"] += 1
            count, sum_ns = self.runs.get(rows, (0, 0))
            self.runs[rows] = (count + 1, sum_ns + engine_ns)
        except EdgeRTError:
            raise
        except Exception as error:
            raise _failed(error) from error
        finally:
            # As in _free, without the call.
            if self._low or self._high:
                self._pass_on(slot)
            else:
                self._idle.append(slot)
                if self._low or self._high:
                    self._rouse()
        if self.tuner is not None:
            self.tuner.add((began_ns + engine_ns - (came_ns or began_ns),))
        return _new(Answer, (outputs, 0, engine_ns, rows))

    def _park(self, ticket: _Ticket) -> _Ticket:
        with self._mutex:
            if self._refusal is not None:
                raise self._refusal
            queue = self._high if ticket.high else self._low
            if len(queue) >= self._queue_max:
                per_request_s = self._last.last_run_s / self._last.last_count / self.instances
                raise Overloaded(
                    f"{len(queue)} requests wait for this model already, its limit; send less or try again later",
                    retry_after_s=max(0.001, per_request_s * self.waiting),
                )
            queue.append(ticket)
            return ticket

    def _wait(self, ticket: _Ticket) -> Answer:
        if ticket.deadline_s is None:
            ticket.gate.acquire()
        elif not ticket.gate.acquire(timeout=max(0.0, ticket.deadline_s - self._clock())):
            with self._mutex:
                queue = self._high if ticket.high else self._low
                if ticket in queue:
                    queue.remove(ticket)
                    raise late()
            ticket.gate.acquire()  # a leader has taken it: the answer is on its way
        if ticket.error is not None:
            raise ticket.error
        if ticket.answer is not None:
            return ticket.answer
        return self._lead(ticket)

    def _lead(self, own: _Ticket) -> Answer:
        """Run a batch with `own` in it, answer the others, and hand the engine on."""
        slot = own.slot
        assert slot is not None  # whoever woke this ticket gave it one
        try:
            cap = self.cap if self.tuner is None else self.tuner.cap
            batch = [own]
            reason = "idle"
            if cap > 1:
                reason = self._linger(slot, own, cap)
                batch += self._take(cap - own.rows)
            self.closed["cap" if _rows(batch) >= cap > 1 else reason] += 1
            self._run(slot, batch)
        finally:
            self._free(slot)
        if own.error is not None:
            raise own.error
        assert own.answer is not None  # _run answers every ticket or gives it an error
        return own.answer

    def _linger(self, slot: _Slot, own: _Ticket, cap: int) -> str:
        """Wait for the cohort of the slot's last run; what will have closed the batch, if not the cap."""
        cohort = min(slot.last_count, cap)
        share = LINGER_SHARE if self.tuner is None else self.tuner.linger_share
        if cohort <= 1 or self.waiting + 1 >= cohort or not share:
            return "idle"
        now_s, reason = self._clock(), "linger"
        until_s = now_s + min(share * slot.last_run_s, LINGER_S_MAX)
        if own.deadline_s is not None and own.deadline_s - slot.last_run_s < until_s:
            until_s, reason = own.deadline_s - slot.last_run_s, "deadline"
        while self.waiting + 1 < cohort and self._clock() < until_s:
            self._sleep(LINGER_STEP_S)
        return reason

    def _take(self, room: int) -> list[_Ticket]:
        """Parked requests that fit into `room` items, the high ones first, each class in order of arrival."""
        taken = []
        with self._mutex:
            for queue in (self._high, self._low):
                while queue and room > 0:
                    if self._expired(queue[0]):
                        queue.popleft()
                        continue
                    if queue[0].rows > room:
                        room = 0  # it goes first in the next batch; nobody overtakes it in this one
                        break
                    taken.append(queue.popleft())
                    room -= taken[-1].rows
            if taken and not taken[-1].high:
                self._bypassed = 0
        return taken

    def _run(self, slot: _Slot, batch: list[_Ticket]) -> None:
        start_ns = time.perf_counter_ns()
        rows = _rows(batch)
        try:
            several = len(batch) > 1
            inputs = self._gather(slot.arena, [one.inputs for one in batch], rows) if several else batch[0].inputs
            outputs = slot.run(inputs)
        except EdgeRTError as error:
            self._fail(batch, error)
            return
        except Exception as error:  # noqa: BLE001  # an engine's own failure must not strand the parked
            self._fail(batch, _failed(error))
            return
        ended_ns = time.perf_counter_ns()
        engine_ns = ended_ns - start_ns
        slot.last_count, slot.last_run_s = len(batch), engine_ns / 1e9
        count, sum_ns = self.runs.get(rows, (0, 0))
        self.runs[rows] = (count + 1, sum_ns + engine_ns)
        if len(batch) == 1:
            batch[0].answer = Answer(outputs, start_ns - batch[0].parked_ns, engine_ns, rows)
        else:
            for ticket, own in zip(batch, _shares(outputs, [one.rows for one in batch]), strict=True):
                ticket.answer = Answer(own, start_ns - ticket.parked_ns, engine_ns, rows)
            for ticket in batch[1:]:
                ticket.gate.release()
        if self.tuner is not None:
            self.tuner.add([ended_ns - ticket.came_ns for ticket in batch])

    def _fail(self, batch: list[_Ticket], error: EdgeRTError) -> None:
        for ticket in batch:
            ticket.error = error
        for ticket in batch[1:]:
            ticket.gate.release()

    def _gather(self, arena: Arrays, requests: Sequence[Sequence[NDArray[Any]]], rows: int) -> Arrays:
        """The inputs of `requests` one after the other, in the arrays of `arena`, which is filled once and kept."""
        if not arena:
            arena += [np.empty((self.cap, *a.shape[1:]), a.dtype) for a in requests[0]]
        for i, whole in enumerate(arena):
            np.concatenate([inputs[i] for inputs in requests], out=whole[:rows])
        return [whole[:rows] for whole in arena]

    def _free(self, slot: _Slot) -> None:
        """The run is over: wake the next leader, or leave the engine idle."""
        if self._low or self._high:
            self._pass_on(slot)
            return
        self._idle.append(slot)
        if self._low or self._high:  # somebody parked just before it could be seen
            self._rouse()

    def _rouse(self) -> None:
        """Give an idle engine, if there is one, to a request that waits."""
        try:
            slot = self._idle.pop()
        except IndexError:
            return
        self._pass_on(slot)

    def _pass_on(self, slot: _Slot) -> None:
        """Whoever holds `slot` gives it to the next leader, or leaves it idle where nobody waits any more."""
        while True:
            with self._mutex:
                leader = self._next_leader()
                if leader is not None:
                    leader.slot = slot
                    leader.gate.release()
                    return
            self._idle.append(slot)
            if not (self._low or self._high):
                return
            try:
                slot = self._idle.pop()
            except IndexError:
                return

    def _next_leader(self) -> _Ticket | None:
        """The first that waits, high ones before low ones within the bound; the expired ones are refused."""
        while self._high or self._low:
            low_leads = not self._high or (self._bypassed >= BYPASS_MAX and bool(self._low))
            leader = (self._low if low_leads else self._high).popleft()
            if self._expired(leader):
                continue
            self._bypassed = 0 if low_leads or not self._low else self._bypassed + 1
            return leader
        return None

    def _expired(self, ticket: _Ticket) -> bool:
        """Whether its time-out has passed; then it is refused here and now."""
        if ticket.deadline_s is None or self._clock() < ticket.deadline_s:
            return False
        ticket.error = late()
        ticket.gate.release()
        return True


def can_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether requests may share a run: rows go in and come out one for one, and all items have one shape."""
    return batchable(inputs) and batchable(outputs) and all(-1 not in spec.item_shape for spec in inputs)


def _shares(outputs: Arrays, counts: Sequence[int]) -> Iterator[Arrays]:
    """What of a batch's outputs belongs to each request, as views; `counts` are the requests' items."""
    at = 0
    for rows in counts:
        yield [array[at : at + rows] for array in outputs]
        at += rows


def _rows(batch: list[_Ticket]) -> int:
    return sum(ticket.rows for ticket in batch)


def _failed(error: Exception) -> EngineFailed:
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")


def late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the request's time-out passed while it waited for the engine; send less or allow more time"
    )
