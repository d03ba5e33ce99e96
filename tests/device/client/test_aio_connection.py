"""The asyncio client's connections against simulated daemons, and their pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from edgert import AsyncClient
from edgert.client.aio_connection import Pool
from edgert.errors import (
    DeadlineExceeded,
    EdgeRTError,
)
from edgert.protocol import wire
from tests.support.clients import run
from tests.support.devices import WAIT_S_MAX
from tests.support.stand_ins.false_daemon import RESULT, WELCOME_FRAME, against, changed

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
ONES = [1.0] * 4
MOVED = wire.json_frame(wire.MOVED, {})


@pytest.mark.parametrize("ending", [MOVED, None], ids=["moved", "closed"])
def test_a_request_that_was_not_read_completely_is_repeated(tmp_path: Path, ending: bytes | None) -> None:
    welcome = wire.json_frame(
        wire.WELCOME,
        {
            "release": 1,
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
        },
    )

    async def test(asking: AsyncClient) -> None:
        assert (await asking.infer("echo", np.zeros((1, 3_000_000), np.float32)))["y"].tolist() == [ONES]

    against(tmp_path, test, [welcome, ending], [welcome, RESULT])


@pytest.mark.parametrize(
    "said",
    [
        changed(RESULT, 8, 2),
        changed(RESULT, 64, 1),
        changed(RESULT, 65, 99),
        changed(RESULT, 6, wire.FLAG_SHARED),
        WELCOME_FRAME,
        bytes(64),
        wire.json_frame(wire.ERROR, {}, request_id=1)[:64].ljust(192, b"{"),
    ],
    ids=["request-id", "output-number", "datatype", "shared", "kind", "zeros", "error"],
)
def test_an_invalid_answer_is_an_error_and_the_next_request_connects_anew(tmp_path: Path, said: bytes) -> None:
    async def test(asking: AsyncClient) -> None:
        with pytest.raises(EdgeRTError):
            await asking.infer("echo", ITEM)
        assert (await asking.infer("echo", ITEM))["y"].tolist() == [ONES]

    against(tmp_path, test, [WELCOME_FRAME, said], [WELCOME_FRAME, RESULT])


def test_the_client_waits_for_a_daemon_whose_queue_is_full(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"

    async def test(listener: socket.socket, held: list[socket.socket]) -> None:
        late = AsyncClient(path, timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match="accept"):
            await late.infer("echo", ITEM)
        request = asyncio.ensure_future(AsyncClient(path, timeout_s=WAIT_S_MAX).models())
        await asyncio.sleep(0.05)
        for _ in range(2):
            held.append(listener.accept()[0])
        listener.setblocking(False)  # the client asks again in this thread
        served, _ = await asyncio.get_running_loop().sock_accept(listener)
        served.sendall(wire.json_frame(wire.WELCOME, {"models": [{"name": "echo"}]}))
        held.append(served)
        assert await request == [{"name": "echo"}]

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(path))
        listener.listen(1)
        for _ in range(2):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(os.fspath(path))
        held: list[socket.socket] = []
        run(test(listener, held))
        for sock in held:
            sock.close()


def test_unexpected_bytes_end_an_idle_connection(tmp_path: Path) -> None:
    async def test(asking: AsyncClient) -> None:
        for _ in range(2):
            assert (await asking.infer("echo", ITEM))["y"].tolist() == [ONES]
            await asyncio.sleep(0.05)

    good: list[bytes | None] = [WELCOME_FRAME, RESULT]
    against(tmp_path, test, [WELCOME_FRAME, RESULT + changed(RESULT, 128, 7)], good)


def test_turns_are_given_in_order_to_the_tasks_that_still_wait() -> None:
    async def test() -> None:
        pool, far = Pool(1), time.monotonic() + WAIT_S_MAX
        await pool.acquire(0.0)  # a turn is free, so no time is needed
        with pytest.raises(DeadlineExceeded, match="raise connections_max or timeout_s"):
            await pool.acquire(time.monotonic())
        cancelled, first, second = (asyncio.ensure_future(pool.acquire(far)) for _ in range(3))
        await asyncio.sleep(0)
        cancelled.cancel()
        pool.release()
        await first
        assert not second.done()
        pool.release()
        await second
        pool.release()
        await pool.acquire(0.0)

    run(test())


def test_the_turn_of_a_task_that_is_cancelled_goes_to_the_next_task() -> None:
    async def test() -> None:
        pool, far = Pool(1), time.monotonic() + WAIT_S_MAX
        await pool.acquire(far)
        first, second = (asyncio.ensure_future(pool.acquire(far)) for _ in range(2))
        await asyncio.sleep(0)
        pool.release()
        first.cancel()  # in the same step of the loop
        with pytest.raises(asyncio.CancelledError):
            await first
        await second

    run(test())
