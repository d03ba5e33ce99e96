"""The behaviour of the daemon for apps and operators: real process, real sockets, models of the null engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert import Client
from edgert.client.aio import AsyncClient
from edgert.daemon.supervisor import STATE_CHECK_S
from edgert.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    EdgeRTError,
    ModelNotFound,
    RequestError,
    ShuttingDown,
    Unavailable,
    WorkerLost,
)
from edgert.protocol import wire
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import BY_COMMAND
from tests.support.clients import HELLO, ITEM, PAUSE_S, halted, load, raw, read_frame, request
from tests.support.devices import WAIT_S_MAX, Device, a_device, events, runs, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Device]:
    """A device with two models, shared by tests that do not change it."""
    with a_device(programs=True) as device:
        device.deploy()
        device.put(model="sum", op="sum")
        yield device


def test_a_client_gets_its_own_answer(serving: Device) -> None:
    with serving.client() as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
        assert client.infer("sum", {"x": ITEM})["y"].tolist() == [[10.0] * 4]
        assert client.infer("echo", ITEM[0])["y"].tolist() == ITEM[0].tolist()
        assert client.infer("echo", np.repeat(ITEM, 5, axis=0))["y"].shape == (5, 4)
        assert [m["name"] for m in client.models()] == ["echo", "sum"]
        assert client.metadata("echo")["release"] == 1


def test_a_traced_response_tells_whether_a_batch_or_the_cache_answered(serving: Device) -> None:
    with serving.client() as client:
        first = client.infer("echo", ITEM + 1, trace=True)
        again = client.infer("echo", ITEM + 1, trace=True)
        uncached = client.infer("echo", ITEM + 1, cache=False, trace=True)
    assert (first.cache_hit, first.batch, first.release) == (False, 1, 1)
    assert (again.cache_hit, again.batch, again.stages.engine_us) == (True, 0, 0)
    assert uncached.cache_hit is False
    assert again.outputs["y"].tolist() == (ITEM + 1).tolist()


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (np.zeros((1, 5), np.float32), r"takes FP32 \[-1, 4\]"),
        (np.zeros((1, 4), np.int32), "FP32"),
        ({"z": ITEM}, "takes inputs"),
        (np.zeros((0, 4), np.float32), "0 items"),
        (np.zeros((5000, 4), np.float32), "split it"),
        (np.array([["a"] * 4]), "FP32"),
    ],
    ids=["shape", "dtype", "name", "empty", "too-many", "text"],
)
def test_wrong_inputs_are_refused_and_the_connection_stays_open(serving: Device, inputs: object, says: str) -> None:
    with serving.client() as client:
        with pytest.raises(RequestError, match=says):
            client.infer("echo", inputs)  # type: ignore[call-overload]  # wrong on purpose
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
def test_a_client_with_a_very_long_time_out_gets_its_answer(serving: Device, timeout_s: float) -> None:
    with Client(serving.socket, timeout_s=timeout_s) as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()

    async def ask() -> list[Any]:
        async with AsyncClient(serving.socket, timeout_s=timeout_s) as client:
            return list((await client.infer("echo", ITEM))["y"].tolist())

    assert asyncio.run(ask()) == ITEM.tolist()


def test_status_works_without_a_readable_spool() -> None:
    with a_device(started=False) as device:
        device.state.spool.mkdir(parents=True)
        assert device.run("status")["telemetry"]["waiting"] == 0


def test_an_unknown_model_is_refused_with_the_known_names(serving: Device) -> None:
    with serving.client() as client, pytest.raises(ModelNotFound, match="echo, sum"):
        client.infer("nothing", ITEM)


def test_without_a_daemon_the_error_says_how_to_start_the_daemon(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(DaemonUnreachable, match="edgertd start"):
        Client(f"{tmp_path}/none.sock").infer("echo", ITEM)


def test_many_threads_share_one_client(serving: Device) -> None:
    def ask(i: int) -> bool:
        return bool(np.array_equal(client.infer("echo", ITEM * i)["y"], ITEM * i))

    with serving.client() as client, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(600)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
        bytes(64),
        wire.json_frame(wire.HELLO, {"model": "x" * 5000}),
        wire.json_frame(wire.INFER, {}),
        HELLO + b"garbage" * 20,
        HELLO + wire.json_frame(wire.WELCOME, {}),
    ],
    ids=["http", "zeros", "long-hello", "no-hello", "garbage-later", "not-for-the-daemon"],
)
def test_a_broken_protocol_gets_an_error_and_ends_the_connection(serving: Device, data: bytes) -> None:
    with raw(serving) as sock:
        sock.sendall(data)
        frame = read_frame(sock)
        if frame.kind == wire.WELCOME:
            frame = read_frame(sock)
        assert frame.kind == wire.ERROR
        assert wire.error_of(frame).code == "request.protocol"
        with contextlib.suppress(ConnectionResetError):  # unread data is dropped with the connection
            assert sock.recv(1) == b""
    with serving.client() as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


def test_a_hello_in_single_bytes_followed_by_requests_is_served(serving: Device) -> None:
    requests = b"".join(request(i) for i in (1, 2, 3))
    with raw(serving) as sock:
        for byte in HELLO:
            sock.send(bytes([byte]))
        sock.sendall(requests)
        assert read_frame(sock).kind == wire.WELCOME
        for i in (1, 2, 3):
            frame = read_frame(sock)
            assert (frame.kind, frame.request_id) == (wire.RESULT, i)
            assert frame.tensors[0].data == ITEM.tobytes()


def test_a_silent_client_does_not_delay_other_clients(serving: Device) -> None:
    with raw(serving), serving.client() as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


def test_hot_swaps_under_load_lose_no_request() -> None:
    with a_device(programs=True) as device:
        device.put()
        with load(device) as (releases, errors):
            for release in range(2, 5):
                device.put(release=release)
                wait_until(lambda release=release: release in releases, "it answers")  # type: ignore[misc]
        assert errors == []
        assert set(releases) == set(range(1, 5))
        assert device.model()["serving"]["release"] == 4


def test_a_killed_worker_fails_its_own_requests_only_and_restarts() -> None:
    with a_device() as device:
        device.put(delay_s=0.005)
        device.put(model="other")
        with load(device) as (releases, errors), load(device, "other", threads=2) as (_, other_errors):
            pid = device.serving()["pid"]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(50 * PAUSE_S)  # now the next request of every client is in progress, and gets no answer
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: bool(errors), "the requests in flight fail")
            told_at = len(releases)
            wait_until(lambda: len(releases) > told_at + 200, "the model serves again")
        assert other_errors == []
        assert all(isinstance(error, WorkerLost | Unavailable) and error.retryable for error in errors)
        serving = device.model()["serving"]
        assert serving["state"] == "ready"
        assert serving["pid"] != pid
        assert serving["crashes"] == 1


def test_a_version_that_keeps_crashing_is_rolled_back() -> None:
    with a_device(programs=True) as device:
        device.put()
        device.put(release=2)
        for _ in range(3):
            wait_until(lambda: device.serving()["state"] == "ready", "it serves")
            serving = device.serving()
            if serving.get("release") == 1:
                break
            pid = serving["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: device.serving().get("pid") != pid, "it is gone")  # type: ignore[misc]
        wait_until(lambda: device.serving().get("release") == 1, "the previous version serves")
        assert device.model()["live"]["release"] == 1


@pytest.mark.parametrize(
    ("bad", "code"), [({"golden_off_by": 1.0}, 9), ({"program": b"?"}, 7)], ids=["wrong answers", "does not load"]
)
def test_a_version_that_fails_its_trial_never_serves(bad: dict[str, object], code: int) -> None:
    with a_device() as device:
        device.put()
        with load(device, threads=2) as (releases, errors):
            device.run("install", os.fspath(device.bundle(release=2, **bad)))
            device.run("activate", "echo", code=code)
            seen = len(releases)
            wait_until(lambda: len(releases) > seen + 50, "the old version serves on")
        assert set(releases) == {1}
        assert errors == []
        assert device.model()["state"] == "steady"
        assert device.model()["live"]["release"] == 1


def test_an_unconfirmed_trial_rolls_back_at_its_end() -> None:
    with a_device() as device:
        device.put()
        device.run("install", os.fspath(device.bundle(release=2)))
        SlotStore(device.state.models / "echo").activate(3.0)
        with contextlib.suppress(EdgeRTError):  # a busy machine may load it for longer than the trial lasts
            device.sync("echo")
        with device.client() as client:
            wait_until(lambda: client.infer("echo", ITEM, trace=True).release == 1, "the previous version returns")
        told = device.model()
        assert (told["state"], told["rolled_back"]["release"]) == ("steady", 2)


def test_rolling_back_makes_the_version_before_live() -> None:
    with a_device() as device:
        device.put()
        device.put(release=2)
        assert device.run("rollback", "echo")["release"] == 1
        with device.client() as client:
            assert client.infer("echo", ITEM, trace=True).release == 1
        (told,) = events(device, "rolled_back")
        assert (told["model"], told["release"], told["reason"]) == ("echo", 2, BY_COMMAND)


def test_a_stop_answers_or_refuses_every_request() -> None:
    with a_device(programs=True) as device:
        device.put(delay_s=0.01)
        with load(device) as (releases, errors):
            device.stop()
            assert device.run("stop")["stopped"] is False
        assert len(releases) > 50
        assert all(isinstance(error, ShuttingDown | DaemonUnreachable | Unavailable) for error in errors)
        assert not device.socket.exists()


def test_a_daemon_that_was_killed_serves_the_same_versions_after_a_restart() -> None:
    with a_device(programs=True) as device:
        device.put()
        device.put(model="other")
        with device.client() as client:
            client.infer("echo", ITEM)
            worker = device.serving("other")["pid"]
            server = int(Path(f"/proc/{worker}/status").read_text().split("PPid:")[1].split()[0])
            pid = device.daemon_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            answered = threading.Event()

            def again() -> bool:
                with contextlib.suppress(Unavailable):
                    answered.set() if client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist() else None
                return answered.is_set()

            wait_until(lambda: device.daemon_pid() is None or again(), "it is gone")
            wait_until(again, "it serves again")
            wait_until(lambda: not runs(worker) and not runs(server), "the processes of the killed daemon have ended")


def test_two_daemons_never_share_a_state_folder() -> None:
    with a_device(programs=True) as device:
        command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(device.state.root), "serve"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX)
        assert done.returncode == 7
        assert "already" in done.stderr


def test_a_request_past_its_deadline_is_refused_and_the_client_continues() -> None:
    with a_device() as device:
        device.put()
        with device.client() as client:
            with halted(device), pytest.raises(DeadlineExceeded):
                client.infer("echo", ITEM, timeout_s=0.1, cache=False)
            assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()


def test_simultaneous_requests_form_batches() -> None:
    with a_device("[serving]\nbatch_max = 8\n") as device:
        device.put(delay_s=0.02)
        asked = 0
        with device.client() as client, ThreadPoolExecutor(8) as pool:

            def batch(number: int) -> int:
                return client.infer("echo", ITEM * number, cache=False, trace=True).batch

            def most() -> int:
                nonlocal asked
                asked += 64
                return max(pool.map(batch, range(64)))

            wait_until(lambda: most() > 4, "more than half of the clients share a batch")
        wait_until(lambda: device.model()["serving"]["requests"]["requests"] >= asked, "every answer is counted")


def test_connections_beyond_the_limit_are_told_to_retry() -> None:
    with a_device("[serving]\nconnections_max = 2\n") as device:
        device.put()
        held = [raw(device) for _ in range(2)]
        for sock in held:
            sock.sendall(HELLO)
            assert read_frame(sock).kind == wire.WELCOME
        with raw(device) as third:
            third.sendall(HELLO)
            error = wire.error_of(read_frame(third))
            assert (error.code, error.retry_after_s is not None) == ("unavailable.overloaded", True)
        for sock in held:
            sock.close()
        with device.client() as client:
            assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


def test_a_client_with_kept_connections_reconnects_to_a_restarted_daemon() -> None:
    with a_device(programs=True) as device:
        device.put()
        with device.client() as client:
            client.infer("echo", ITEM)
            device.stop()
            device.start()
            assert client.infer("echo", ITEM * 2)["y"].tolist() == (ITEM * 2).tolist()


def test_a_swap_sends_waiting_requests_to_the_new_version() -> None:
    with a_device("[serving]\nbatch_max = 1\n") as device:
        device.put(delay_s=0.5)  # the queue would need 40 s, longer than the load of the next version
        with device.client(timeout_s=120) as client, ThreadPoolExecutor(80) as pool:
            waiting = [pool.submit(client.infer, "echo", ITEM * i, cache=False, trace=True) for i in range(80)]
            wait_until(lambda: device.serving()["waiting"] > 40, "the queue is long")
            device.put(release=2)
            answers = [future.result(120) for future in waiting]
        assert {answer.release for answer in answers} == {1, 2}
        assert [float(a.outputs["y"][0, 0]) for a in answers] == [float(i) for i in range(80)]


def test_a_foreign_file_at_the_socket_path_is_not_removed() -> None:
    with a_device(started=False) as device:
        device.socket.write_text("precious")
        answer = device.run("start", code=7)
        assert "is not a socket" in answer["error"]["message"]
        assert device.socket.read_text() == "precious"


def test_a_daemon_ends_when_its_state_folder_is_removed() -> None:
    """The daemon checks the folder every 30 s. Here its clock runs 100 times as fast, and the test wakes it."""
    program = (
        "import sys, time; from pathlib import Path; from edgert.state_dir import StateDir;"
        "from edgert.daemon.supervisor import Supervisor;"
        "Supervisor(StateDir(Path(sys.argv[1])), lambda: 100 * time.monotonic()).run()"
    )
    with a_device(started=False, programs=True) as device:
        daemon = subprocess.Popen([sys.executable, "-c", program, os.fspath(device.state.root)])
        wait_until(lambda: device.daemon_pid() == daemon.pid, "the daemon answers")
        with socket.socket(socket.AF_UNIX) as command:
            command.connect(os.fspath(device.state.control_socket))
            shutil.rmtree(device.state.root)
            time.sleep(STATE_CHECK_S / 100)
            with contextlib.suppress(OSError):  # the daemon may have noticed this and ended already
                command.sendall(b"{}\n")
            assert daemon.wait(WAIT_S_MAX) == 0
        device.prepare()


def test_a_check_names_which_of_two_artifacts_of_one_engine_serves() -> None:
    """A profile may prefer one engine twice, in INT8 and in FP32; each has its own golden answers."""
    with a_device() as device:
        device.put(first=("null", b"?"))  # this artifact does not load
        checked = device.run("check", "echo")
        assert (checked["artifact"], checked["engine"]) == ("null", "null")
        assert device.serving()["artifact"] == "null"
        assert device.serving()["degraded"] is True


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("edgert.daemon.supervisor", {"numpy", "cryptography", "sqlite3"}),
        ("edgert.telemetry.forwarder_process", {"numpy", "cryptography"}),
        ("edgert.worker.worker", {"cryptography", "onnxruntime", "paho"}),
    ],
)
def test_a_process_imports_only_what_it_needs(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
