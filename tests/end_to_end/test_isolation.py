"""A fault of an engine fails only the requests in progress on this engine. The tests inject each fault."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.config import read_config
from edgert.daemon.model import restarts
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.workers.worker_process import LOAD_S_MAX, WorkerProcess
from edgert.daemon.workers.worker_set import CHECK_S_MAX
from edgert.engines import Session
from edgert.engines.fault import EXIT_CODE, MAGIC
from edgert.errors import EdgeRTError, Unavailable, WorkerLost
from edgert.tensors import TensorSpec
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Version
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from edgert.worker_link.run_page import RunPage
from tests.support.clients import ITEM, load
from tests.support.devices import WAIT_S_MAX, Device, a_device, events, wait_until

SWAPS = int(os.environ.get("EDGERT_TEST_SWAPS", "40"))
CLIENTS = 16


def magic(fault: str) -> np.ndarray[Any, Any]:
    value = next(value for value, name in MAGIC.items() if name == fault)
    return np.array([[1.0, value, 1.0, 1.0]], np.float32)


def say(device: Device, fault: str, model: str = "echo", timeout_s: float = WAIT_S_MAX) -> EdgeRTError:
    """Return the error of a request that makes the engine do `fault`."""
    with device.client() as client, pytest.raises(EdgeRTError) as caught:
        client.infer(model, magic(fault), cache=False, timeout_s=timeout_s)
    return caught.value


@pytest.fixture
def pair() -> Iterator[Device]:
    """A device with two models: one on the fault engine, and a sound one."""
    with a_device("[serving]\nbatch_max = 1\n", programs=True) as device:
        device.put(engine="fault")
        device.put(model="other")
        yield device


@pytest.fixture
def impatient() -> Iterator[Device]:
    """Like `pair`, but a run may last at most four seconds, because a busy machine may delay a run."""
    with a_device("[serving]\nrun_s_max = 4.0\nbatch_max = 1\n") as device:
        device.put(engine="fault")
        device.put(model="other")
        yield device


@pytest.mark.parametrize("fault", ["segfault", "exit", "hang", "hang-holding-lock"])
def test_a_fault_fails_only_its_own_requests(request: pytest.FixtureRequest, fault: str) -> None:
    pair: Device = request.getfixturevalue("impatient" if fault.startswith("hang") else "pair")
    with load(pair, "other", threads=2) as (others, other_errors):
        before = len(others)
        error = say(pair, fault)
        assert isinstance(error, WorkerLost | Unavailable)
        assert error.retryable
        with pair.client() as client:
            wait_until(lambda: pair.serving()["state"] == "ready", "it is back")
            assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
        assert len(others) > before
    assert other_errors == []
    state = pair.serving()
    assert (state["state"], state["crashes"]) == ("ready", 1)
    crashed = events(pair, "crashed")
    assert [(event["model"], event["crashes"]) for event in crashed] == [("echo", 1)]
    assert ("its limit of 4 s" in crashed[0]["reason"]) == fault.startswith("hang")


def test_a_worker_stays_alive_when_its_engine_refuses_a_run(pair: Device) -> None:
    pid = pair.serving()["pid"]
    assert say(pair, "raise").code == "device.engine_failed"
    assert (pair.serving()["pid"], pair.serving()["crashes"]) == (pid, 0)


def test_a_slow_run_within_the_limit_is_not_ended(pair: Device) -> None:
    pid = pair.serving()["pid"]
    with pair.client() as client:
        for _ in range(4):
            client.infer("echo", magic("slow"), cache=False)
    assert (pair.serving()["pid"], pair.serving()["crashes"]) == (pid, 0)


def test_a_worker_that_leaks_is_replaced_at_the_soft_limit_without_a_failed_request() -> None:
    with a_device("[serving]\nworker_mb_max = 150\nbatch_max = 1\n", programs=True) as device:
        device.put(engine="fault")
        pid = device.serving()["pid"]
        with load(device, threads=4) as (_, errors), device.client() as client:
            while device.serving()["memory_mb"] < 160:
                client.infer("echo", magic("leak"), cache=False)
            wait_until(lambda: device.serving()["pid"] != pid, "another worker serves")
            wait_until(lambda: device.serving()["memory_mb"] < 150, "the memory is back")
        assert errors == []
        assert device.serving()["crashes"] == 0
        (recycled,) = events(device, "recycled")
        assert recycled["memory_mb"] > recycled["limit_mb"] == 150


def test_a_leak_beyond_the_hard_limit_counts_as_a_crash() -> None:
    with a_device("[serving]\nworker_mb_max = 100\nbatch_max = 1\n", programs=True) as device:
        device.put(engine="fault", program={"runs": [{"fault": "leak", "value": 7.0, "mb": 300}]})
        pid = device.serving()["pid"]
        with device.client() as client:
            for _ in range(2):  # if the memory is checked during the first leak, the worker is replaced, not killed
                with contextlib.suppress(WorkerLost):  # the run may still be in progress
                    client.infer("echo", np.full_like(ITEM, 7.0), cache=False)
                wait_until(lambda: device.serving()["crashes"] or device.serving()["pid"] != pid, "a check has seen it")
                if device.serving()["crashes"]:
                    break
            wait_until(lambda: device.serving()["crashes"] == 1, "it is killed")
            wait_until(lambda: device.serving()["state"] == "ready", "it is back")
            assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


def test_a_version_on_trial_that_crashes_at_load_is_rolled_back() -> None:
    with a_device() as device:
        device.put()
        device.run(
            "install",
            os.fspath(device.bundle(release=2, engine="fault", program={"load": {"fault": "segfault"}})),
        )
        device.run("activate", "echo", code=7)
        assert device.model()["live"]["release"] == 1
        with device.client() as client:
            assert client.infer("echo", ITEM, trace=True).release == 1


def test_after_three_crashes_the_good_version_before_serves_and_never_a_version_that_failed() -> None:
    with a_device("[serving]\nbatch_max = 1\n", programs=True) as device:
        device.put(engine="fault")
        device.put(release=2, engine="fault")
        for crash in range(6):
            wait_until(lambda: device.serving()["state"] == "ready", "it serves")
            assert device.serving()["release"] == (2 if crash < 3 else 1)
            pid = device.serving()["pid"]
            say(device, "exit")
            wait_until(lambda pid=pid: device.serving()["pid"] != pid, "it is gone")  # type: ignore[misc]
        wait_until(lambda: device.serving()["state"] == "quarantined", "it is quarantined")
        events(device, "quarantined")
        told = [event["event"] for event in events(device)]
        assert told.count("crashed") == 6
        assert told.count("rolled_back") == 1
        assert told[-1] == "quarantined"
        error = say(device, "raise", timeout_s=5.0)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 5
        assert "quarantined" in error.message


def test_a_worker_killed_by_the_kernel_restarts_and_others_are_not_affected(pair: Device) -> None:
    pid = pair.serving()["pid"]
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) > 0  # the kernel kills it before the supervisor
    other = pair.serving("other")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pair.serving()["pid"] not in (None, pid), "it is back")
    assert pair.serving("other")["pid"] == other


def test_models_serve_without_the_fork_server_and_a_crash_starts_a_new_fork_server(pair: Device) -> None:
    pair.stop()
    pair.start()  # the first model was installed before the second: now both workers are forks
    wait_until(lambda: all(pair.serving(name)["state"] == "ready" for name in ("echo", "other")), "both serve")
    pids = [pair.serving()["pid"], pair.serving("other")["pid"]]
    servers = {int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0]) for pid in pids}
    assert len(servers) == 1, "both are forks of one server"
    os.kill(servers.pop(), signal.SIGKILL)
    with pair.client() as client:
        assert client.infer("other", ITEM)["y"].tolist() == ITEM.tolist()
    say(pair, "exit")
    wait_until(lambda: pair.serving()["pid"] not in (None, pids[0]), "it is back")
    say(pair, "exit")
    wait_until(lambda: pair.serving()["crashes"] == 2 and pair.serving()["state"] == "ready", "it is back again")
    reasons = [event["reason"].rsplit(": ", 1)[1] for event in events(pair, "crashed")]
    assert reasons == ["exit code unknown", f"exit code {EXIT_CODE}"]
    assert pair.serving("other")["pid"] == pids[1]


# --- engine preference ----------------------------------------------------------------------------


def test_the_next_engine_serves_if_the_first_does_not_load_and_the_status_reports_this() -> None:
    with a_device() as device:
        device.put(first=("fault", b'{"op": "copy", "load": {"fault": "raise"}}'))
        state = device.serving()
        assert (state["state"], state["engine"], state["degraded"]) == ("degraded", "null", True)
        assert "first: the fault engine was asked to fail" in state["tried"][0]
        with device.client() as client:
            assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
        (degraded,) = events(device, "degraded")
        assert (degraded["model"], degraded["model_version"]) == ("echo", "r1")


def test_with_strict_only_the_first_engine_serves() -> None:
    with a_device("[serving]\nstrict = true\n") as device:
        device.put()
        device.run("install", os.fspath(device.bundle(release=2, first=("fault", b"?"))))
        device.run("activate", "echo", code=7)
        assert (device.serving()["state"], device.serving()["release"]) == ("ready", 1)


# --- the switch to a new version ------------------------------------------------------------------


@pytest.mark.timeout(0)  # each swap has its own limit; on a busy machine, all swaps take many times as long
def test_no_request_fails_over_many_swaps_under_load() -> None:
    """The test swaps two good releases SWAPS times. CLIENTS clients send more than the engine can answer.

    In the first half, each worker is a separate program. In the second half, there are two models, so each worker is a
    fork.
    """
    with a_device("[serving]\nbatch_max = 1\n", programs=True) as device:
        device.put(
            delay_s=0.003
        )  # the engine is always busy, but enough processor time is left to start the next worker
        device.put(release=2, delay_s=0.003)
        swap_under_load(device, SWAPS // 2)
        device.put(model="other")
        swap_under_load(device, SWAPS - SWAPS // 2)
        assert device.serving()["crashes"] == 0


def swap_under_load(device: Device, swaps: int) -> None:
    store = SlotStore(device.state.models / "echo")
    with load(device, threads=CLIENTS) as (releases, errors):
        for _ in range(swaps):
            before = device.serving()["release"]
            store.rollback()  # from one good version to the other
            assert device.sync("echo")["release"] == {1: 2, 2: 1}[before]
            assert errors == []
        seen = len(releases)
        wait_until(lambda: len(releases) > seen + CLIENTS, "the load goes on")
    assert errors == []
    assert set(releases) == {1, 2}


# --- quarantine, with a clock of the test's own -------------------------------------------------


class Clock:
    """The real time, plus the time that the test adds."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added


class OneService:
    """A ModelService, and only the necessary parts of a supervisor's loop."""

    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._workers: list[WorkerProcess] = []
        self.service = ModelService(
            "echo",
            device.state,
            read_config(device.state),
            "b1",
            lambda event, fields: self.told.append((event, fields)),
            lambda service, slots: True,
            clock,
            self._start,
        )

    def _start(self, load_message: LoadMessage, version: Version, now_s: float) -> WorkerProcess:
        self._workers.append(WorkerProcess.start(load_message, version, now_s))
        return self._workers[-1]

    def turn(self) -> None:
        ready, _, _ = select.select([worker.link for worker in self._workers], [], [], 0.02)
        for worker in list(self._workers):
            if worker.link in ready:
                received = link.receive(worker.link)
                if received is None:
                    self._workers.remove(worker)
                    worker.link.close()
                    self.service.handle_end(worker)
                else:
                    self.service.handle_message(worker, received[0])
        self.service.tick()

    def until(self, true: Callable[[], bool], what: str) -> None:
        def turned() -> bool:
            self.turn()
            return true()

        wait_until(turned, what)

    def names(self) -> list[str]:
        return [name for name, _ in self.told]


def test_a_quarantined_model_is_retried_at_growing_intervals_until_it_loads() -> None:
    with a_device(started=False, programs=True) as device:
        marker = device.folder / "broken"
        program = {"load": {"fault": "segfault", "while_file": os.fspath(marker)}}
        install(device.bundle(engine="fault", program=program), device.state, read_config(device.state))
        store = SlotStore(device.state.models / "echo")
        store.activate(60)
        store.mark_good()
        marker.touch()
        clock = Clock()
        one = OneService(device, clock)
        one.service.sync()
        for pause_s in restarts.QUARANTINE_PAUSES_S[:2]:
            seen = one.names().count("quarantined")
            one.until(lambda seen=seen: one.names().count("quarantined") > seen, "it is quarantined")  # type: ignore[misc]
            assert one.told[-1][1]["retry_s"] == pause_s
            assert one.service.state == "quarantined"
            due_s = one.service.due_s()
            assert due_s is not None
            assert 0 < due_s - clock() <= pause_s
            clock.added += pause_s
        marker.unlink()
        clock.added += restarts.QUARANTINE_PAUSES_S[-1]
        one.until(lambda: one.service.state == "ready", "it serves")
        one.service.stop()
        one.until(lambda: not list(one.service.workers), "it has ended")


@pytest.mark.parametrize("speaks", [True, False])
def test_an_engine_that_reports_progress_is_not_killed_as_stuck(speaks: bool) -> None:
    """A rebuild of a TensorRT plan takes minutes. An engine that reports no progress is seen as stuck."""
    with a_device(started=False, programs=True) as device:
        fault = {"fault": "slow", "s": 2.0} if speaks else {"fault": "hang-holding-lock"}
        install(device.bundle(engine="fault", program={"load": fault}), device.state, read_config(device.state))
        store = SlotStore(device.state.models / "echo")
        store.activate(60)
        store.mark_good()
        clock = Clock()
        one = OneService(device, clock)
        one.service.sync()
        started = one.service.workers.loading
        assert started is not None
        if speaks:
            one.until(lambda: bool(started.progress), "it says what it does")
            assert one.service.status().loading == "loading takes 2 s"
        for _ in range(2 * int(LOAD_S_MAX / CHECK_S_MAX)):  # a single large step would count as a pause of the device
            clock.added += CHECK_S_MAX
            one.turn()
        assert (started.killed_at_s is None) is speaks
        if speaks:
            one.until(lambda: one.service.state == "ready", "it serves")
        one.service.stop()
        one.until(lambda: not list(one.service.workers), "it has ended")


# --- the run page ---------------------------------------------------------------------------------


class GatedSession(Session):
    """A session whose runs last until the test ends them."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()

    def run(self, tensors: Any) -> list[Any]:
        self.began.set()
        assert self.ends.wait(WAIT_S_MAX)
        return []

    def close(self) -> None:
        return None


def test_the_other_process_sees_in_a_run_page_when_a_run_begins_and_ends() -> None:
    page, session = RunPage.create(lambda: 5_000_000_000), GatedSession()
    other_side = RunPage(os.dup(page.descriptor))
    watched = page.track(session)
    assert (other_side.running_since_s(), other_side.last_run_s()) == (None, 0.0)
    thread = threading.Thread(target=watched.run, args=([],))
    thread.start()
    assert session.began.wait(WAIT_S_MAX)
    assert other_side.running_since_s() == 5.0
    session.ends.set()
    thread.join()
    assert (other_side.running_since_s(), other_side.last_run_s()) == (None, 5.0)


def test_a_run_that_raises_counts_as_ended() -> None:
    page = RunPage.create()
    with pytest.raises(TypeError):
        page.track(GatedSession()).run()  # type: ignore[call-arg]  # no tensors
    assert page.running_since_s() is None
