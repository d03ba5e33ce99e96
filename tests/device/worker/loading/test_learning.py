"""Learning of threads, instances and the batch cap: it takes limited time, and the next load uses its result."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.config import parse_config
from edgert.engines import ENGINES, Session
from edgert.errors import ConfigInvalid, EngineFailed
from edgert.tensors import TensorSpec
from edgert.worker.loading.learned import Learned
from edgert.worker.loading.learning import BATCH_CAP_MAX, LEARN_S_MAX, learn
from edgert.worker_link.run_page import SESSIONS_MAX
from tests.support.circumstances import circumstances
from tests.support.devices import a_device

SAMPLE: list[NDArray[Any]] = [np.zeros((1, 2), np.float32)]


class Machine:
    """A simulated device with sessions: a run takes `fixed_s`, and `item_s` for each item.

    At most `useful` threads share this time, and each further thread costs `thread_s`. A load takes `load_s`. The
    machine counts its open sessions, and their largest number at once.
    """

    def __init__(
        self, fixed_s: float, item_s: float, useful: int = 1, thread_s: float = 0.0, load_s: float = 0.01
    ) -> None:
        self.fixed_s, self.item_s, self.useful, self.thread_s, self.load_s = fixed_s, item_s, useful, thread_s, load_s
        self.now_s = 0.0
        self.open = self.open_max = self.loads = self.runs = 0
        self.item_mb = self.held_mb = 0.0  # the memory of a session for each item of its largest batch

    def clock(self) -> float:
        return self.now_s

    def load(self, threads: int) -> SimulatedSession:
        self.now_s += self.load_s
        self.held_mb = 0.0
        self.loads += 1
        self.open += 1
        self.open_max = max(self.open, self.open_max)
        return SimulatedSession(self, threads)


class SimulatedSession(Session):
    def __init__(self, machine: Machine, threads: int) -> None:
        self.inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (-1, 2)),)
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "FP32", (-1, 2)),)
        self.machine, self.threads = machine, threads

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        machine = self.machine
        machine.runs += 1
        machine.held_mb = max(machine.held_mb, machine.item_mb * len(tensors[0]))
        busy_s = (machine.fixed_s + machine.item_s * len(tensors[0])) / min(self.threads, machine.useful)
        machine.now_s += busy_s + machine.thread_s * (self.threads - 1)
        return list(tensors)

    def close(self) -> None:
        self.machine.open -= 1


def learned_on(machine: Machine, **changes: Any) -> Learned:
    wanted = circumstances(**changes)
    sessions, learned = learn(machine.load, machine.load(wanted.threads_to_try[0]), SAMPLE, wanted, machine.clock)
    assert machine.open == len(sessions) == (1 if ENGINES[wanted.engine].concurrent else learned.instances)
    assert all(s.threads == learned.threads for s in sessions if isinstance(s, SimulatedSession))
    return learned


def test_a_small_model_gets_one_thread_and_a_large_model_gets_all_threads_that_help() -> None:
    assert learned_on(Machine(0, 13e-6, useful=4, thread_s=13e-6)).threads == 1
    assert learned_on(Machine(0, 10e-3, useful=4)).threads == 4
    assert learned_on(Machine(0, 10e-3, useful=2)).threads == 2


@pytest.mark.parametrize(
    ("fixed_s", "item_s", "cap"),
    [(4e-3, 0.1e-3, BATCH_CAP_MAX), (0, 2e-3, 1), (0.2e-3, 1e-3, 8)],
)
def test_the_cap_is_the_largest_batch_that_still_gains_a_twentieth_per_item(
    fixed_s: float, item_s: float, cap: int
) -> None:
    assert learned_on(Machine(fixed_s, item_s)).batch_cap == cap


@pytest.mark.parametrize(("item_mb", "cap", "loads"), [(0.0, 32, 1), (1.0, 32, 2), (12.0, 4, 2), (100.0, 2, 2)])
def test_batches_that_take_much_memory_are_neither_tried_nor_kept(item_mb: float, cap: int, loads: int) -> None:
    machine = Machine(4e-3, 0.1e-3)
    machine.item_mb = item_mb
    sessions, learned = learn(
        machine.load,
        machine.load(1),
        SAMPLE,
        circumstances(threads=1),
        machine.clock,
        memory_mb=lambda: machine.held_mb,
    )
    assert (learned.batch_cap, machine.loads, machine.held_mb) == (cap, loads, 0.0 if loads > 1 else item_mb)
    assert machine.open == len(sessions) == 1


def test_a_batch_size_without_a_gain_does_not_hide_the_next_size_with_a_gain() -> None:
    machine = Machine(4e-3, 0.1e-3)
    session = machine.load(1)
    run = session.run

    def odd(tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        machine.now_s += 4e-3 if len(tensors[0]) == 2 else 0
        return run(tensors)

    session.run = odd  # type: ignore[method-assign]
    _, learned = learn(machine.load, session, SAMPLE, circumstances(threads=1), machine.clock)
    assert learned.batch_cap == BATCH_CAP_MAX


@pytest.mark.parametrize("run_s", [20e-6, 5e-3, 0.1, 0.3])
@pytest.mark.parametrize("load_s", [0.001, 0.3])
def test_learning_ends_within_its_time_limit(run_s: float, load_s: float) -> None:
    machine = Machine(0.9 * run_s, 0.1 * run_s, useful=4, load_s=load_s)
    before = machine.load(1)
    began = machine.now_s
    _, learned = learn(machine.load, before, SAMPLE, circumstances(), machine.clock)
    assert machine.now_s - began == pytest.approx(learned.took_s, abs=0.01)
    assert learned.took_s <= LEARN_S_MAX
    assert machine.open_max == 1, "no more memory than serving takes"


@pytest.mark.parametrize(("taken_mb", "instances"), [(60.0, 2), (70.0, 1)])
def test_simultaneous_runs_that_take_much_memory_are_not_kept(taken_mb: float, instances: int) -> None:
    machine, memory_mb = Machine(0, 10e-3), iter([500.0, 500.0, 500.0 + taken_mb, 500.0 + taken_mb])
    wanted = circumstances(cpus=2, batch_max=1, threads=1)
    _, learned = learn(machine.load, machine.load(1), SAMPLE, wanted, machine.clock, memory_mb=lambda: next(memory_mb))
    assert (learned.instances, machine.open) == (instances, 1)
    assert machine.loads == 2, "the session that took the memory is replaced"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_several_instances_share_a_session_if_the_engine_allows_this(engine: str) -> None:
    given = learned_on(Machine(0, 10e-3, useful=1), optimize_for="throughput", threads=1, instances=2, engine=engine)
    assert (given.threads, given.instances) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "instances"),
    [({}, 2), ({"threads": 1}, 4), ({"cpus": 1}, 1), ({"instances": 1}, 1), ({"engine": "openvino"}, 1)],
    ids=["half of the processors a run", "one thread a run", "one processor", "configured", "not shared"],
)
def test_simultaneous_runs_share_a_session_if_the_engine_allows_this(changes: dict[str, Any], instances: int) -> None:
    learned = learned_on(Machine(0, 10e-3, useful=2), **changes)
    assert (learned.batch_cap, learned.instances) == (1, instances)


@pytest.mark.parametrize(
    ("item_s", "thread_s", "changes", "own"),
    [
        (0.4e-3, 0.08e-3, {}, True),
        (0.4e-3, 0.0, {}, False),
        (4e-3, 0.8e-3, {}, False),
        (0.4e-3, 0.08e-3, {"reactor": False}, False),
        (0.4e-3, 0.08e-3, {"cpus": 1}, False),
        (0.4e-3, 0.08e-3, {"threads": 2}, False),
        (0.4e-3, 0.08e-3, {"engine": "openvino"}, False),
    ],
    ids=["threads wait", "none waits", "slow", "no reactor", "one processor", "configured", "not shared"],
)
def test_the_reactor_gets_a_session_of_one_thread_if_the_threads_of_a_run_wait_for_each_other(
    item_s: float, thread_s: float, changes: dict[str, Any], own: bool
) -> None:
    learned = learned_on(Machine(0, item_s, useful=2, thread_s=thread_s), **{"cpus": 2, "reactor": True, **changes})
    assert learned.reactor_session is own
    if own:
        assert (learned.threads, learned.instances) == (2, 2), "a lone client keeps the runs of two threads"


def test_the_run_page_has_space_for_the_parallel_runs_of_a_machine_with_many_processors() -> None:
    learned = learned_on(Machine(0.1e-3, 0.5e-3, useful=2), cpus=600)
    assert 1 < learned.instances <= SESSIONS_MAX // 2, "the reactor may have as many runs"


@pytest.mark.parametrize(("taken_mb", "own"), [(60.0, True), (70.0, False)])
def test_the_reactor_gets_no_session_that_takes_much_memory(taken_mb: float, own: bool) -> None:
    machine = Machine(0, 0.4e-3, useful=2, thread_s=0.08e-3)
    wanted = circumstances(cpus=2, batch_max=1, reactor=True)
    _, learned = learn(
        machine.load, machine.load(1), SAMPLE, wanted, machine.clock, memory_mb=lambda: taken_mb * machine.open
    )
    assert (learned.reactor_session, machine.open) == (own, 1)


@pytest.mark.parametrize(
    ("fixed_s", "item_s", "instances"),
    [(0.1e-3, 0.5e-3, 2), (4e-3, 0.5e-3, 1), (0, 50e-6, 1)],
    ids=["batches gain little", "batches gain much", "the reactor serves it"],
)
def test_a_model_that_is_quick_or_gains_much_from_batches_runs_once_at_a_time(
    fixed_s: float, item_s: float, instances: int
) -> None:
    assert learned_on(Machine(fixed_s, item_s, useful=2), cpus=2).instances == instances


def test_configured_values_are_not_measured_but_the_time_of_an_item_is_measured() -> None:
    learned = learned_on(Machine(1e-3, 1e-3), threads=3, batch_max=8)
    assert (learned.threads, learned.batch_cap, learned.threads_us, learned.run_us) == (3, 8, {}, {"1": 2000.0})
    assert circumstances(threads=3).threads_to_try == (3,)
    assert circumstances(engine="tensorrt").threads_to_try == (1,)
    assert circumstances(cpus=6).threads_to_try == (1, 2, 4, 6)


def test_a_session_that_fails_is_closed() -> None:
    machine = Machine(1e-3, 1e-3)
    session = machine.load(1)

    def fails(tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        raise EngineFailed("no")

    session.run = fails  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        learn(machine.load, session, SAMPLE, circumstances(), machine.clock)
    assert machine.open == 0


def test_simultaneous_runs_that_fail_are_not_kept() -> None:
    class OneThreadSession(SimulatedSession):
        def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            if threading.current_thread() is not threading.main_thread():
                raise EngineFailed("no memory")
            return super().run(tensors)

    machine = Machine(0, 10e-3, useful=2)
    machine.load = lambda threads: OneThreadSession(machine, threads)  # type: ignore[method-assign]
    _, learned = learn(machine.load, machine.load(1), SAMPLE, circumstances(), machine.clock)
    assert learned.instances == 1


def test_a_measurement_on_a_busy_device_is_repeated_and_the_quietest_counts() -> None:
    def measured(others_s: float) -> Learned:
        machine, busy = Machine(1e-3, 1e-3), iter([(100.0, 50.0), (104.0, 50.0 + others_s)])
        return learn(machine.load, machine.load(1), SAMPLE, circumstances(), machine.clock, lambda: next(busy))[1]

    quiet, busy, busier = measured(0.1), measured(2.0), measured(3.0)
    assert [one.doubtful for one in (quiet, busy, busier)] == [False, True, True]
    assert busier.less_disturbed(quiet).others == quiet.others
    assert not busier.less_disturbed(quiet).doubtful
    again = busier.less_disturbed(busy)
    assert (again.others, again.measured, again.doubtful) == (busy.others, 2, True)
    assert not again.less_disturbed(busier).doubtful, "enough is enough"


@pytest.mark.parametrize(
    "text",
    [
        '[serving]\noptimize_for = "fast"',
        "[models.a]\nnear = 2.0",
        "[models.a]\np95_ms = -1",
        "[models.a]\nshadow = -0.1",
    ],
)
def test_configured_values_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        parse_config(f'device = "d"\nprofile = "p"\n{text}\n', "config.toml")


def test_the_daemon_learns_once_and_serves_with_the_configured_instances() -> None:
    with a_device("[serving]\ninstances = 2\n") as device:
        device.put(delay_s=0.002)
        serving = device.serving()
        assert (serving["instances"], serving["threads"]) == (2, 1)
        assert serving["batch_cap"] > 1
        paths = [path for path in device.state.learned.glob("*.json") if "learned" in json.loads(path.read_text())]
        assert len(paths) == 1
        value = json.loads(paths[0].read_text())
        value["learned"] |= {"batch_cap": 5, "others": 0.0}
        paths[0].write_text(json.dumps(value))
        device.stop()
        device.start()
        with device.client() as client:
            assert client.infer("echo", np.ones((1, 4), np.float32), priority="high")["y"].tolist() == [[1.0] * 4]
        assert device.serving()["batch_cap"] == 5, "what was learned is not measured again"
