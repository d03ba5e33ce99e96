"""The micro-batcher: answers belong to their askers, batches form out of what waits, nobody is stranded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import DeadlineExceeded, EngineFailed, Overloaded
from edgert.serving.batcher import Answer, Batcher
from edgert.tensors import TensorSpec
from tests.devices import wait_until


class GatedSession:
    """Doubles its input; each run waits for a permit, so that a test decides when a batch ends."""

    def __init__(self, batch_axis: int = -1, open_gate: bool = False) -> None:
        self.inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (batch_axis, 2)),)
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "FP32", (batch_axis, 2)),)
        self.sizes: list[int] = []
        self.running = threading.Semaphore(0)
        self.permits = threading.Semaphore(10_000 if open_gate else 0)
        self.failure: Exception | None = None

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.sizes.append(len(tensors[0]))
        self.running.release()
        assert self.permits.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        return [tensors[0] * 2]

    def close(self) -> None:
        return None


def item(value: float, rows: int = 1) -> NDArray[Any]:
    return np.full((rows, 2), value, np.float32)


def ask_all(
    pool: ThreadPoolExecutor, batcher: Batcher, values: Sequence[float], rows: int = 1, deadline_s: float | None = None
) -> list[Future[Answer]]:
    """Requests in this order, each parked before the next is made."""
    futures = []
    for value in values:
        before = batcher.waiting
        futures.append(pool.submit(batcher.infer, [item(value, rows)], rows, deadline_s))
        wait_until(lambda before=before: batcher.waiting > before, "the request parks")  # type: ignore[misc]
    return futures


def test_a_lone_request_runs_at_once_in_its_own_thread() -> None:
    session = GatedSession(open_gate=True)
    answer = Batcher(session, cap=8).infer([item(3)], 1)
    assert answer.outputs[0].tolist() == [[6, 6]]
    assert answer.batch == 1
    assert session.sizes == [1]


def test_what_arrives_while_the_engine_is_busy_forms_the_next_batch_in_order() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        rest = ask_all(pool, batcher, [1, 2, 3, 4, 5])
        session.permits.release(2)
        assert first.result(10).batch == 1
        answers = [future.result(10) for future in rest]
    assert session.sizes == [1, 5]
    assert [a.outputs[0].tolist() for a in answers] == [[[2 * v, 2 * v]] for v in (1, 2, 3, 4, 5)]
    assert {a.batch for a in answers} == {5}
    assert all(a.queue_ns > 0 for a in answers)


def test_no_batch_exceeds_the_cap_and_requests_of_several_items_stay_whole() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=4)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        rest = ask_all(pool, batcher, [1, 2], rows=3) + ask_all(pool, batcher, [3])
        session.permits.release(10)
        answers = [future.result(10) for future in (first, *rest)]
    assert session.sizes[0] == 1
    assert sorted(session.sizes[1:]) in ([3, 4], [1, 3, 3])
    assert [a.outputs[0].tolist() for a in answers[1:]] == [[[2, 2]] * 3, [[4, 4]] * 3, [[6, 6]]]


def test_a_request_larger_than_the_cap_runs_by_itself() -> None:
    session = GatedSession(open_gate=True)
    assert len(Batcher(session, cap=4).infer([item(1, 9)], 9).outputs[0]) == 9


def test_a_model_with_a_fixed_batch_is_never_batched() -> None:
    session = GatedSession(batch_axis=1)
    batcher = Batcher(session, cap=8)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        rest = ask_all(pool, batcher, [1, 2])
        session.permits.release(10)
        [future.result(10) for future in (first, *rest)]
    assert session.sizes == [1, 1, 1]


def test_a_full_queue_refuses_with_advice_and_loses_nothing() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8, queue_max=2)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        rest = ask_all(pool, batcher, [1, 2])
        with pytest.raises(Overloaded) as caught:
            batcher.infer([item(3)], 1)
        assert caught.value.retry_after_s is not None
        session.permits.release(10)
        assert [f.result(10).batch for f in (first, *rest)] == [1, 2, 2]


def test_an_expired_request_never_costs_engine_time() -> None:
    session = GatedSession()
    clock = [0.0]
    batcher = Batcher(session, cap=8, clock=lambda: clock[0])
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        late = ask_all(pool, batcher, [1], deadline_s=1000.0)
        on_time = ask_all(pool, batcher, [2])
        clock[0] = 2000.0
        session.permits.release(10)
        first.result(10)
        assert on_time[0].result(10).batch == 1
        with pytest.raises(DeadlineExceeded):
            late[0].result(10)
    assert session.sizes == [1, 1]


def test_a_request_that_waits_past_its_deadline_is_refused_while_the_engine_still_runs() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        with pytest.raises(DeadlineExceeded):
            batcher.infer([item(1)], 1, deadline_s=0.0)
        assert batcher.waiting == 0
        session.permits.release(1)
        first.result(10)


def test_a_failing_run_fails_its_own_batch_only_and_the_next_is_served() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    session.failure = RuntimeError("boom")
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.infer, [item(0)], 1)
        session.running.acquire()
        rest = ask_all(pool, batcher, [1, 2])
        session.permits.release(2)
        for future in (first, *rest):
            with pytest.raises(EngineFailed, match="boom"):
                future.result(10)
    session.failure = None
    session.permits.release(1)
    assert batcher.infer([item(4)], 1).outputs[0].tolist() == [[8, 8]]


def test_many_threads_each_get_their_own_answer() -> None:
    session = GatedSession(open_gate=True)
    batcher = Batcher(session, cap=8, queue_max=1000)

    def many(start: int) -> bool:
        return all(
            batcher.infer([item(v)], 1).outputs[0].tolist() == [[2.0 * v, 2.0 * v]] for v in range(start, start + 200)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(many, range(0, 16_000, 1000)))
    assert batcher.waiting == 0
    assert sum(batcher.closed.values()) == len(session.sizes)
