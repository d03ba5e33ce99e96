"""The micro-batcher: each request gets its own answer, and waiting requests form batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.engines import Session
from edgert.errors import DeadlineExceeded, EngineFailed, Overloaded
from edgert.tensors import TensorSpec
from edgert.worker.pipeline.batcher import BYPASS_MAX, LINGER_STEP_S, RELEASE_AFTER_S, Batcher, EngineAnswer
from edgert.worker.pipeline.tuning import DECISION_ANSWERS, LatencyTuner
from tests.support.devices import WAIT_S_MAX, wait_until


class GatedSession(Session):
    """Doubles its input. Each run waits for a permit, so a test decides when a batch ends."""

    def __init__(self, batch_axis: int = -1, open_gate: bool = False) -> None:
        self.inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (batch_axis, 2)),)
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "FP32", (batch_axis, 2)),)
        self.sizes: list[int] = []
        self.releases = 0
        self.first: list[float] = []  # the first value of each run
        self.running = threading.Semaphore(0)
        self.permits = threading.Semaphore(10_000 if open_gate else 0)
        self.failure: Exception | None = None

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.sizes.append(len(tensors[0]))
        self.first.append(float(tensors[0].flat[0]))
        self.running.release()
        assert self.permits.acquire(timeout=WAIT_S_MAX)
        if self.failure is not None:
            raise self.failure
        return [tensors[0] * 2]

    def release_memory(self, sample: Sequence[NDArray[Any]]) -> None:
        self.run(sample)
        self.releases += 1

    def close(self) -> None:
        return None


def item(value: float, rows: int = 1) -> NDArray[Any]:
    return np.full((rows, 2), value, np.float32)


def occupied(
    pool: ThreadPoolExecutor, batcher: Batcher, session: GatedSession, inputs: list[NDArray[Any]] | None = None
) -> Future[EngineAnswer]:
    """Send a request whose run keeps the engine busy until it gets a permit."""
    first = pool.submit(batcher.infer, inputs or [item(0)], 1)
    session.running.acquire()
    return first


def ask_in_order(
    pool: ThreadPoolExecutor, batcher: Batcher, sent: Sequence[list[NDArray[Any]]], **more: Any
) -> list[Future[EngineAnswer]]:
    """Send requests in this order; each request waits in the queue before the next request is sent."""
    futures = []
    for inputs in sent:
        before = batcher.waiting
        futures.append(pool.submit(batcher.infer, inputs, len(inputs[0]), **more))
        wait_until(lambda before=before: batcher.waiting > before, "the request waits")  # type: ignore[misc]
    return futures


def ask_all(
    pool: ThreadPoolExecutor,
    batcher: Batcher,
    values: Sequence[float],
    rows: int = 1,
    deadline_s: float | None = None,
    high: bool = False,
) -> list[Future[EngineAnswer]]:
    """Send a request for each of `values`, as `ask_in_order` does."""
    return ask_in_order(pool, batcher, [[item(value, rows)] for value in values], deadline_s=deadline_s, high=high)


def test_a_lone_request_runs_at_once_in_its_own_thread() -> None:
    session = GatedSession(open_gate=True)
    answer = Batcher(session, cap=8).infer([item(3)], 1)
    assert answer.outputs[0].tolist() == [[6, 6]]
    assert answer.batch == 1
    assert session.sizes == [1]


def test_requests_that_arrive_during_a_run_form_the_next_batch_in_order() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2, 3, 4, 5])
        session.permits.release(2)
        assert first.result(WAIT_S_MAX).batch == 1
        answers = [future.result(WAIT_S_MAX) for future in rest]
    assert session.sizes == [1, 5]
    assert [a.outputs[0].tolist() for a in answers] == [[[2 * v, 2 * v]] for v in (1, 2, 3, 4, 5)]
    assert {a.batch for a in answers} == {5}
    assert all(a.queue_ns > 0 for a in answers)


def test_no_batch_exceeds_the_cap_and_requests_of_several_items_stay_whole() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=4)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2], rows=3) + ask_all(pool, batcher, [3])
        session.permits.release(10)
        answers = [future.result(WAIT_S_MAX) for future in (first, *rest)]
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
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2])
        session.permits.release(10)
        [future.result(WAIT_S_MAX) for future in (first, *rest)]
    assert session.sizes == [1, 1, 1]


def test_a_full_queue_refuses_new_requests_with_advice_and_keeps_the_waiting_requests() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8, queue_max=2)
    with ThreadPoolExecutor(4) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2])
        with pytest.raises(Overloaded) as caught:
            batcher.infer([item(3)], 1)
        assert caught.value.retry_after_s is not None
        session.permits.release(10)
        assert [f.result(WAIT_S_MAX).batch for f in (first, *rest)] == [1, 2, 2]


def test_an_expired_request_never_costs_engine_time() -> None:
    session = GatedSession()
    clock = [0.0]
    batcher = Batcher(session, cap=8, clock=lambda: clock[0])
    with ThreadPoolExecutor(4) as pool:
        first = occupied(pool, batcher, session)
        late = ask_all(pool, batcher, [1], deadline_s=1000.0)
        on_time = ask_all(pool, batcher, [2])
        clock[0] = 2000.0
        session.permits.release(10)
        first.result(WAIT_S_MAX)
        assert on_time[0].result(WAIT_S_MAX).batch == 1
        with pytest.raises(DeadlineExceeded):
            late[0].result(WAIT_S_MAX)
    assert session.sizes == [1, 1]


def test_a_request_that_waits_past_its_deadline_is_refused_while_the_engine_still_runs() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    with ThreadPoolExecutor(4) as pool:
        first = occupied(pool, batcher, session)
        with pytest.raises(DeadlineExceeded):
            batcher.infer([item(1)], 1, deadline_s=0.0)
        assert batcher.waiting == 0
        session.permits.release(1)
        first.result(WAIT_S_MAX)


def test_a_failing_run_fails_its_own_batch_only_and_the_next_is_served() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8)
    session.failure = RuntimeError("boom")
    with ThreadPoolExecutor(4) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2])
        session.permits.release(2)
        for future in (first, *rest):
            with pytest.raises(EngineFailed, match="boom"):
                future.result(WAIT_S_MAX)
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
    assert sum(batcher.close_reasons.values()) == len(session.sizes)


# --- two priorities --------------------------------------------------------------------------------


def test_requests_with_high_priority_run_first_and_each_class_keeps_its_order() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=1)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2]) + ask_all(pool, batcher, [3, 4], high=True)
        session.permits.release(10)
        [future.result(WAIT_S_MAX) for future in (first, *rest)]
    assert session.first == [0, 3, 4, 1, 2]


def test_a_batch_takes_requests_with_high_priority_first_and_is_filled_with_low_priority() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=3)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1, 2]) + ask_all(pool, batcher, [3, 4], high=True)
        session.permits.release(10)
        answers = [future.result(WAIT_S_MAX) for future in (first, *rest)]
    assert session.sizes == [1, 3, 1]
    assert session.first[1] == 3
    assert [a.batch for a in answers] == [1, 3, 1, 3, 3]


def test_a_request_with_low_priority_is_passed_over_at_most_a_fixed_number_of_times() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=1)
    with ThreadPoolExecutor(2 * BYPASS_MAX + 8) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [-1, -2])
        rest += ask_all(pool, batcher, range(1, 2 * BYPASS_MAX + 4), high=True)
        session.permits.release(100)
        [future.result(WAIT_S_MAX) for future in (first, *rest)]
    assert session.first.index(-1) == BYPASS_MAX + 1
    assert session.first.index(-2) == 2 * BYPASS_MAX + 2


def test_a_queue_full_of_requests_with_low_priority_still_takes_high_priority() -> None:
    session = GatedSession()
    batcher = Batcher(session, cap=8, queue_max=1)
    with ThreadPoolExecutor(4) as pool:
        first = occupied(pool, batcher, session)
        rest = ask_all(pool, batcher, [1]) + ask_all(pool, batcher, [2], high=True)
        for high in (False, True):
            with pytest.raises(Overloaded):
                batcher.infer([item(3)], 1, high=high)
        session.permits.release(10)
        [future.result(WAIT_S_MAX) for future in (first, *rest)]


# --- the reasons that close a batch --------------------------------------------------------------------------


class Patience:
    """A clock that moves only when the leader lingers; `on_sleep` is called at every step."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_sleep: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds == LINGER_STEP_S
        self.now_s += seconds
        self.on_sleep()


def closed_after_a_batch_of_two(*, time_out: bool = False, joined: bool = False) -> dict[str, int]:
    """Return the reasons that close the batch after a batch of two.

    One request leads, and other requests come late or never. With `time_out`, hardly any of the leader's time is left
    when it begins to lead.
    """
    session, patience = GatedSession(), Patience()
    batcher = Batcher(session, cap=3, clock=patience.clock, sleep=patience.sleep)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session)
        two = ask_all(pool, batcher, [1, 2])
        session.permits.release(1)
        session.running.acquire()
        batcher.close_reasons.clear()
        late: list[Future[EngineAnswer]] = []
        if joined:
            patience.on_sleep = lambda: late or late.__iadd__(ask_all(pool, batcher, [4, 5]))
        leader = ask_all(pool, batcher, [3], deadline_s=1000.0 if time_out else None)
        patience.now_s = 1000.0 - 1e-9
        session.permits.release(10)
        [future.result(WAIT_S_MAX) for future in (first, *two, *leader, *late)]
    return dict(batcher.close_reasons)


def test_a_batch_that_waited_in_vain_is_counted_as_closed_by_lingering() -> None:
    assert closed_after_a_batch_of_two() == {"linger": 1}


def test_a_batch_that_filled_up_is_counted_as_closed_by_the_cap() -> None:
    assert closed_after_a_batch_of_two(joined=True) == {"cap": 1}


def test_a_leader_with_little_time_left_does_not_wait_for_others() -> None:
    assert closed_after_a_batch_of_two(time_out=True) == {"deadline": 1}


# --- several engines ----------------------------------------------------------------------------


def test_two_instances_run_at_once_and_every_request_is_answered() -> None:
    one, two = GatedSession(), GatedSession()
    batcher = Batcher(one, cap=8, more_sessions=[two])
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(batcher.infer, [item(v)], 1) for v in (1, 2)]
        one.running.acquire(timeout=WAIT_S_MAX)
        two.running.acquire(timeout=WAIT_S_MAX)
        rest = ask_all(pool, batcher, [3, 4, 5])
        two.permits.release(1)
        two.running.acquire(timeout=WAIT_S_MAX)
        assert two.sizes == [1, 3]
        for session in (one, two):
            session.permits.release(10)
        values = [float(future.result(WAIT_S_MAX).outputs[0][0, 0]) for future in (*running, *rest)]
    assert values == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert batcher.waiting == 0


def open_batcher(cap: int = 8) -> tuple[GatedSession, Batcher]:
    """Return a batcher of a model whose items may have any length."""
    session = GatedSession()
    session.inputs = session.outputs = (TensorSpec("x", "FP32", (-1, -1)),)
    return session, Batcher(session, cap)


def wide(value: float, length: int, rows: int = 1) -> list[NDArray[Any]]:
    return [np.full((rows, length), value, np.float32)]


def test_only_items_of_one_shape_run_together_and_the_oldest_request_determines_the_shape() -> None:
    session, batcher = open_batcher()
    sent = [wide(1, 4), wide(2, 8), wide(3, 4), wide(4, 8), wide(5, 4)]
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session, wide(0, 4))
        rest = ask_in_order(pool, batcher, sent)
        session.permits.release(10)
        answers = [future.result(WAIT_S_MAX) for future in (first, *rest)]
    assert session.sizes == [1, 3, 2]
    assert session.first == [0, 1, 2]
    for given, answer in zip(sent, answers[1:], strict=True):
        np.testing.assert_array_equal(answer.outputs[0], 2 * given[0])
    assert [answer.batch for answer in answers] == [1, 3, 2, 3, 2, 3]


def test_requests_of_other_shapes_keep_their_places_and_high_priority_still_goes_first() -> None:
    session, batcher = open_batcher(cap=2)
    with ThreadPoolExecutor(8) as pool:
        first = occupied(pool, batcher, session, wide(0, 4))
        rest = ask_in_order(pool, batcher, [wide(1, 4), wide(2, 8), wide(3, 8), wide(4, 4), wide(5, 4)])
        rest += ask_in_order(pool, batcher, [wide(6, 8)], high=True)
        session.permits.release(10)
        for future in (first, *rest):
            future.result(WAIT_S_MAX)
    assert session.first[:3] == [
        0,
        6,
        1,
    ]  # the high request leads, and its batch includes the first waiting request of the same length
    assert session.sizes == [1, 2, 2, 1, 1]
    assert session.first[3:] == [3, 5]


# --- the latency target -------------------------------------------------------------------------


def simulate(tuner: LatencyTuner, clients: int, fixed_ms: float, item_ms: float, answers: int) -> list[float]:
    """Return the latencies in ms, in order, of a closed loop of `clients` on one engine.

    A batch takes t(b) = fixed + b * item. A client sends its next request at once, and waits for the batch after the
    next run, like in the batcher.
    """
    now_ms = 0.0
    latencies: list[float] = []
    queue = deque([0.0] * clients)
    while len(latencies) < answers:
        batch = [queue.popleft() for _ in range(min(tuner.cap, len(queue)))]
        now_ms += fixed_ms + item_ms * len(batch)
        took = [now_ms - came for came in batch]
        tuner.add([round(ms * 1e6) for ms in took])
        latencies += took
        queue.extend([now_ms] * len(batch))
    return latencies


def p95(latencies: Sequence[float]) -> float:
    return sorted(latencies)[len(latencies) * 95 // 100 - 1]


def test_without_load_the_cap_keeps_its_learned_value() -> None:
    tuner = LatencyTuner(20.0, 32)
    simulate(tuner, clients=1, fixed_ms=2, item_ms=1, answers=2000)
    assert (tuner.cap, tuner.state) == (32, "holds")


def test_the_cap_shrinks_until_the_target_holds_and_grows_back_slowly() -> None:
    """Few of 40 clients are in a run, and the other clients do not wait for it: only the run's own time counts."""
    tuner = LatencyTuner(20.0, 32)

    def load(run_ms_of: Callable[[int], float], windows: int) -> list[int]:
        caps = []
        for _ in range(windows * DECISION_ANSWERS * 2):
            tuner.add([round(run_ms_of(tuner.cap) * 1e6)])
            caps.append(tuner.cap)
        return caps

    load(lambda cap: 2.0 + cap, windows=20)
    settled = load(lambda cap: 2.0 + cap, windows=40)
    assert 10 <= min(settled) <= max(settled) <= 19
    assert tuner.linger_share < 0.1
    lighter = load(lambda cap: 1.0, windows=4)
    assert 0 < lighter[-1] - lighter[0] <= 8, "one step a window"
    assert load(lambda cap: 1.0, windows=40)[-1] == 32


def test_the_cap_is_kept_if_smaller_batches_make_requests_wait_longer() -> None:
    tuner = LatencyTuner(20.0, 32)
    before = p95(simulate(LatencyTuner(1e9, 32), clients=64, fixed_ms=20, item_ms=0.1, answers=4000))
    after = p95(simulate(tuner, clients=64, fixed_ms=20, item_ms=0.1, answers=40_000)[-8000:])
    assert tuner.state == "overloaded"
    assert after <= 1.5 * before


def test_a_batcher_with_a_target_measures_its_own_answers() -> None:
    session = GatedSession(open_gate=True)
    batcher = Batcher(session, cap=8, p95_ms=10_000.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda v: batcher.infer([item(v)], 1), range(2 * DECISION_ANSWERS)))
    told = batcher.status().tuner
    assert told is not None
    assert told.state == "holds"
    assert 0 < (told.p95_ms or 0) < 10_000


def test_requests_of_one_thread_share_a_run_and_get_their_own_answers() -> None:
    session = GatedSession(open_gate=True)
    batcher = Batcher(session, cap=4)
    for rows in ([1, 1, 2], [1, 2], [6]):
        answers = batcher.infer_together([([item(i, count)], count) for i, count in enumerate(rows)])
        assert [a.outputs[0].tolist() for a in answers] == [(2 * item(i, n)).tolist() for i, n in enumerate(rows)]
        assert {answer.batch for answer in answers} == {sum(rows)}
    assert session.sizes == [4, 3, 6]
    assert batcher.close_reasons == {"cap": 2, "idle": 1}


def test_requests_of_one_thread_do_not_run_after_all_their_deadlines() -> None:
    now = [0.0]
    session = GatedSession()
    batcher = Batcher(session, cap=4, clock=lambda: now[0])
    with ThreadPoolExecutor(2) as pool:
        first = occupied(pool, batcher, session)
        two = pool.submit(batcher.infer_together, [([item(1)], 1), ([item(2)], 1)], 5.0)
        wait_until(lambda: batcher.waiting == 1, "they park")
        now[0] = 6.0
        session.permits.release(2)
        first.result(WAIT_S_MAX)
        with pytest.raises(DeadlineExceeded):
            two.result(WAIT_S_MAX)
    assert session.sizes == [1]


def test_requests_of_one_thread_fail_together() -> None:
    session = GatedSession(open_gate=True)
    session.failure = RuntimeError("boom")
    batcher = Batcher(session, cap=4)
    with pytest.raises(EngineFailed, match="boom"):
        batcher.infer_together([([item(1)], 1), ([item(2)], 1)])
    session.failure = None
    assert len(batcher.infer_together([([item(1)], 1), ([item(2)], 1)])) == 2


# --- memory ---------------------------------------------------------------------------------------


def test_after_large_runs_each_idle_engine_gives_back_their_memory_once() -> None:
    now_s, sessions = 0.0, [GatedSession(open_gate=True) for _ in range(2)]
    batcher = Batcher(sessions[0], cap=8, clock=lambda: now_s, more_sessions=sessions[1:])
    batcher.infer([item(1)], 1)
    assert not batcher.release_memory(lambda: [item(0)])  # no run was large
    batcher.infer([item(1, 4)], 4)
    now_s = RELEASE_AFTER_S - 1
    assert not batcher.release_memory(lambda: [item(0)])  # the large run ended a moment ago
    now_s = RELEASE_AFTER_S
    assert batcher.release_memory(lambda: [item(0)])
    assert not batcher.release_memory(lambda: [item(0)])
    assert [session.releases for session in sessions] == [1, 1]
    assert batcher.infer([item(3)], 1).outputs[0].tolist() == [[6, 6]]


def test_two_threads_may_release_memory_at_once() -> None:
    """The other thread releases the memory while the first thread reads the clock."""
    now_s, released = 0.0, list[bool]()

    def clock() -> float:
        nonlocal now_s
        if now_s == RELEASE_AFTER_S:
            now_s += 1
            released.append(batcher.release_memory(lambda: [item(0)]))
        return now_s

    batcher = Batcher(GatedSession(open_gate=True), cap=8, clock=clock)
    batcher.infer([item(1, 4)], 4)
    now_s = RELEASE_AFTER_S
    batcher.release_memory(lambda: [item(0)])
    assert released == [True]


def test_an_engine_that_cannot_release_memory_continues_to_serve() -> None:
    now_s, session = 0.0, GatedSession(open_gate=True)
    batcher = Batcher(session, cap=8, clock=lambda: now_s)
    batcher.infer([item(1, 4)], 4)
    now_s, session.failure = RELEASE_AFTER_S, EngineFailed("no")
    batcher.release_memory(lambda: [item(0)])
    session.failure = None
    assert batcher.infer([item(3)], 1).outputs[0].tolist() == [[6, 6]]
