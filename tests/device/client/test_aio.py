"""The asyncio client against the real daemon, and against simulated daemons."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert import AsyncClient
from edgert.client.aio_connection import Connection
from edgert.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    EdgeRTError,
    ModelNotFound,
    RequestError,
    SessionLost,
    ShuttingDown,
    Unavailable,
    WorkerLost,
)
from edgert.protocol import wire
from tests.support.clients import PAUSE_S, halted, run
from tests.support.devices import WAIT_S_MAX, Device, a_device
from tests.support.stand_ins.false_daemon import RESULT, WELCOME_FRAME, against, false_daemon

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
ONES = [1.0] * 4
MOVED = wire.json_frame(wire.MOVED, {})


def client(device: Device, **options: Any) -> AsyncClient:
    return AsyncClient(device.socket, **{"timeout_s": 20.0, **options})


async def until(true: Callable[[], bool], what: str) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + WAIT_S_MAX
    while not true():
        assert loop.time() < end, f"waited in vain: {what}"
        await asyncio.sleep(0.01)


async def off_loop(work: Callable[[], Any]) -> Any:
    """Run a blocking command of the device in a thread, so that the loop continues."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


@pytest.fixture(scope="module")
def serving() -> Iterator[Device]:
    """A device for all tests that do not change it."""
    with a_device() as device:
        device.put()
        device.put(model="sum", op="sum")
        device.put(model="slow", delay_s=0.3)
        device.put(model="large", item_shape=(300_000,))
        yield device


def test_a_client_gets_its_own_answer(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            assert (await asking.infer("echo", ITEM))["y"].tolist() == ITEM.tolist()
            assert (await asking.infer("sum", {"x": ITEM}))["y"].tolist() == [[10.0] * 4]
            for _ in range(2):
                assert (await asking.infer("echo", ITEM[0]))["y"].tolist() == ITEM[0].tolist()
                assert (await asking.infer("echo", [1, 2, 3, 4.5]))["y"].tolist() == [1, 2, 3, 4.5]
                assert (await asking.infer("echo", np.repeat(ITEM, 5, axis=0)))["y"].shape == (5, 4)
                assert (await asking.infer("echo", np.repeat(ITEM, 2, axis=1)[:, ::2]))["y"].tolist() == ITEM.tolist()
            assert {m["name"] for m in await asking.models()} >= {"echo", "sum", "slow", "large"}
            assert (await asking.metadata("echo"))["release"] == 1
            assert await asking.labels("echo") == []

    run(test())


def test_a_traced_response_tells_whether_a_batch_or_the_cache_answered(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            first = await asking.infer("echo", ITEM + 1, trace=True)
            again = await asking.infer("echo", ITEM + 1, trace=True)
            uncached = await asking.infer("echo", ITEM + 1, cache=False, priority="high", trace=True)
        assert (first.cache_hit, first.batch, first.release) == (False, 1, 1)
        assert (again.cache_hit, again.batch, again.stages.engine_us) == (True, 0, 0)
        assert uncached.cache_hit is False
        assert again.outputs["y"].tolist() == (ITEM + 1).tolist()

    run(test())


def test_inputs_that_do_not_fit_are_refused_and_the_client_continues(serving: Device, tmp_path: Path) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            with pytest.raises(RequestError, match=r"takes FP32 \[-1, 4\]"):
                await asking.infer("echo", np.zeros((1, 5), np.float32))
            with pytest.raises(RequestError, match="0 items"):
                await asking.infer("echo", np.zeros((0, 4), np.float32))
            with pytest.raises(RequestError, match="takes inputs"):
                await asking.infer("echo", {"z": ITEM})
            with pytest.raises(RequestError, match="priority"):
                await asking.infer("echo", ITEM, priority="urgent")  # type: ignore[call-overload]  # wrong on purpose
            with pytest.raises(ModelNotFound, match="echo"):
                await asking.infer("nothing", ITEM)
            assert set(asking._pools) == {"echo"}, "names of users must not fill the memory"
            assert (await asking.infer("echo", ITEM))["y"].tolist() == ITEM.tolist()
        with pytest.raises(RequestError, match="closed"):
            await asking.infer("echo", ITEM)
        with pytest.raises(DaemonUnreachable, match="edgertd start"):
            await AsyncClient(tmp_path / "none.sock").infer("echo", ITEM)

    run(test())


def shared_areas() -> int:
    """Return the number of areas shared with a daemon that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:edgert")


def test_large_tensors_pass_through_shared_memory_unchanged(serving: Device) -> None:
    async def test() -> None:
        gc.collect()  # this frees an area of an earlier test, which an error still references
        before = shared_areas()
        for transport, areas in (("auto", 3), ("socket", 0)):
            async with client(serving, transport=transport) as asking:
                for values in ((1, 2, 3), (4, 5), (6, 7, 8)):
                    sent = [np.full((1, 300_000), value, np.float32) for value in values]
                    got = await asyncio.gather(*(asking.infer("large", one, cache=False) for one in sent))
                    assert [(one["y"] == value).all() for one, value in zip(got, values, strict=True)] == [True] * len(
                        values
                    )
                assert shared_areas() - before == areas
            gc.collect()
            assert shared_areas() == before
        with pytest.raises(RequestError, match="auto, socket"):
            AsyncClient(serving.socket, transport="pigeon")

    run(test())


def test_an_answer_does_not_change_with_the_next_request(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            first = (await asking.infer("echo", ITEM))["y"]
            second = (await asking.infer("echo", ITEM * 2))["y"]
        assert (first.tolist(), second.tolist()) == (ITEM.tolist(), (ITEM * 2).tolist())
        first[:] = 0  # the app may also write to the arrays

    run(test())


def test_many_tasks_share_one_client_and_few_connections(serving: Device) -> None:
    async def ask(asking: AsyncClient, i: int) -> bool:
        return bool(np.array_equal((await asking.infer("echo", ITEM * i))["y"], ITEM * i))

    async def test() -> None:
        async with client(serving, connections_max=5) as asking:
            answers = await asyncio.gather(*(ask(asking, i) for i in range(500)))
            assert all(answers)
            assert serving.serving("echo")["connections"] <= 5

    run(test())


def test_the_loop_is_free_while_the_engine_works(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            with halted(serving, "slow"):
                request = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
                for _ in range(4):
                    await asyncio.sleep(0.01)
                assert not request.done()
            assert (await request)["y"].tolist() == ITEM.tolist()

    run(test())


def test_tensors_of_megabytes_are_sent_and_received_in_pieces(serving: Device) -> None:
    async def ask(asking: AsyncClient, i: int) -> None:
        rows = np.arange(i, i + 3 * 300_000, dtype=np.float32).reshape(3, 300_000)
        np.testing.assert_array_equal((await asking.infer("large", rows, cache=False))["y"], rows)

    async def test() -> None:
        async with client(serving) as asking:
            for _ in range(2):
                await asyncio.gather(*(ask(asking, i) for i in range(6)))
            with pytest.raises(RequestError, match="send fewer items at once"):
                await asking.infer("large", np.zeros((60, 300_000), np.float32))

    run(test())


def test_a_request_past_its_deadline_fails_and_its_late_answer_is_not_given_to_the_next(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            await asking.infer("slow", ITEM)
            with halted(serving, "slow"), pytest.raises(DeadlineExceeded):
                await asking.infer("slow", ITEM, timeout_s=0.05, cache=False)
            assert (await asking.infer("slow", ITEM * 2, cache=False))["y"].tolist() == (ITEM * 2).tolist()
            with pytest.raises(DeadlineExceeded):
                await asking.infer("slow", ITEM, timeout_s=0, cache=False)
            for none in (-1, math.nan):
                with pytest.raises(RequestError, match="give seconds, 0 or more"):
                    await asking.infer("slow", ITEM, timeout_s=none)

    run(test())


def test_a_cancelled_request_closes_its_connection(serving: Device) -> None:
    async def test() -> None:
        async with client(serving, connections_max=1) as asking:
            await asking.infer("slow", ITEM)  # now the client is connected
            for i in range(1, 4):
                with halted(serving, "slow"):
                    request = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
                    await asyncio.sleep(0.05)
                    request.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await request
                assert (await asking.infer("slow", ITEM * i, cache=False))["y"].tolist() == (ITEM * i).tolist()

    run(test())


def test_a_request_that_stops_waiting_for_a_turn_does_not_take_a_turn_from_others(serving: Device) -> None:
    async def test() -> None:
        async with client(serving, connections_max=1) as asking:
            with halted(serving, "slow"):
                first = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
                await asyncio.sleep(0.05)
                late = asyncio.ensure_future(asking.infer("slow", ITEM, timeout_s=0.05, cache=False))
                cancelled = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
                last = asyncio.ensure_future(asking.infer("slow", ITEM * 3, cache=False))
                with pytest.raises(DeadlineExceeded, match="other requests"):
                    await late
                cancelled.cancel()
            assert (await first)["y"].tolist() == ITEM.tolist()
            assert (await last)["y"].tolist() == (ITEM * 3).tolist()
            assert cancelled.cancelled()
            # The turn and the cancellation arrive in one step of the loop.
            first = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
            await asyncio.sleep(0.05)
            second = asyncio.ensure_future(asking.infer("slow", ITEM, cache=False))
            first.add_done_callback(lambda _: second.cancel())
            await first
            with pytest.raises(asyncio.CancelledError):
                await second
            assert (await asking.infer("slow", ITEM * 4, cache=False))["y"].tolist() == (ITEM * 4).tolist()

    run(test())


def test_a_client_outlives_its_loop_and_serves_one_loop_at_a_time(serving: Device) -> None:
    asking = client(serving)

    async def test() -> None:
        assert (await asking.infer("echo", ITEM))["y"].tolist() == ITEM.tolist()

    run(test())
    run(test())

    async def other() -> None:
        await test()
        with pytest.raises(RequestError, match="loop"):
            await off_loop(lambda: asyncio.run(test()))
        await asking.close()

    run(other())


@asynccontextmanager
async def load(
    device: Device, model: str = "echo", tasks: int = 8
) -> AsyncIterator[tuple[list[int], list[EdgeRTError]]]:
    """Run tasks of one client without a pause; yield the releases that answered, and the errors."""
    stop = False
    releases: list[int] = []
    errors: list[EdgeRTError] = []

    async def ask(asking: AsyncClient, number: int) -> None:
        while not stop:
            await asyncio.sleep(PAUSE_S)
            try:
                response = await asking.infer(model, ITEM * number, cache=False, trace=True)
                assert response.outputs["y"].tolist() == (ITEM * number).tolist()
                releases.append(response.release)
            except EdgeRTError as error:
                errors.append(error)
                await asyncio.sleep(0.01)

    async with client(device) as asking:
        pool = [asyncio.ensure_future(ask(asking, i)) for i in range(tasks)]
        try:
            await until(lambda: len(releases) > 50, "the load has begun")
            yield releases, errors
        finally:
            stop = True
            await asyncio.gather(*pool)


def test_hot_swaps_under_load_lose_no_request(serving: Device) -> None:
    async def test() -> None:
        async with load(serving, "swapped") as (releases, errors):
            for release in range(2, 6):
                await off_loop(lambda release=release: serving.put(model="swapped", release=release))  # type: ignore[misc]
                seen = len(releases)
                await until(lambda seen=seen: len(releases) > seen + 50, "the load goes on")  # type: ignore[misc]
        assert errors == []
        assert set(releases) == set(range(1, 6))

    serving.put(model="swapped")
    run(test())


def test_a_client_that_was_idle_during_a_swap_gets_the_new_release(serving: Device) -> None:
    async def test() -> None:
        async with client(serving) as asking:
            assert (await asking.infer("moves", ITEM, trace=True)).release == 1
            await off_loop(lambda: serving.put(model="moves", release=2))
            # The daemon tells the old worker to end when the new worker serves. Until then, the old worker may answer.
            while (await asking.infer("moves", ITEM, cache=False, trace=True)).release == 1:
                await asyncio.sleep(0.01)

    serving.put(model="moves")
    run(test())


def test_a_lost_worker_fails_only_its_own_requests_and_the_client_recovers(serving: Device) -> None:
    async def test() -> None:
        async with load(serving, "lost") as (releases, errors):
            seen = 0

            def served() -> bool:
                return len(releases) > seen + 20

            while not errors:  # on a busy machine, a worker may end between two requests
                seen = len(releases)
                pid = (await off_loop(lambda: serving.serving("lost")))["pid"]
                if pid is None:  # the next worker has not loaded yet
                    await asyncio.sleep(0.01)
                    continue
                os.kill(pid, signal.SIGKILL)
                await until(lambda: bool(errors) or served(), "the requests in flight are told")
            seen = len(releases)
            await until(served, "the model serves again")
        assert len(errors) <= 8
        assert any(isinstance(error, WorkerLost) for error in errors)
        assert all(isinstance(error, Unavailable) for error in errors)

    # Runs are so long that requests are nearly always in progress: three kills in a row would quarantine the model.
    serving.put(model="lost", delay_s=0.1)
    run(test())


def test_stopping_the_daemon_answers_or_refuses_every_request() -> None:
    async def test(device: Device) -> None:
        async with load(device) as (_, errors):
            await off_loop(lambda: device.run("stop"))
            await until(lambda: bool(errors), "the clients are told")
        assert all(isinstance(error, ShuttingDown | DaemonUnreachable | Unavailable) for error in errors)

    with a_device() as device:
        device.put(delay_s=0.01)
        run(test(device))


# --- against simulated daemons ------------------------------------------------------------------


def test_a_request_is_repeated_after_moved_and_never_after_a_lost_worker(tmp_path: Path) -> None:
    async def moved(asking: AsyncClient) -> None:
        assert (await asking.infer("echo", ITEM))["y"].tolist() == [ONES]

    async def lost(asking: AsyncClient) -> None:
        with pytest.raises(WorkerLost):
            await asking.infer("echo", ITEM)
        assert (await asking.infer("echo", ITEM))["y"].tolist() == [ONES]

    good: list[bytes | None] = [WELCOME_FRAME, RESULT]
    against(tmp_path, moved, [WELCOME_FRAME, MOVED], good)
    (tmp_path / "false.sock").unlink()
    against(tmp_path, lost, [WELCOME_FRAME, None], good)


def test_a_request_waits_for_a_model_until_its_deadline(tmp_path: Path) -> None:
    def loading(retry_after_s: float) -> list[bytes | None]:
        return [wire.error_frame(Unavailable("it is being loaded", retry_after_s=retry_after_s))]

    async def patient(asking: AsyncClient) -> None:
        assert (await asking.infer("echo", ITEM))["y"].tolist() == [ONES]

    async def hasty(asking: AsyncClient) -> None:
        with pytest.raises(Unavailable, match="loaded"):
            await asking.infer("echo", ITEM, timeout_s=WAIT_S_MAX)

    async def refused(asking: AsyncClient) -> None:
        with pytest.raises(Unavailable, match="loaded"):  # not a time-out, which would hide this reason
            await asking.infer("echo", ITEM, timeout_s=0.3)

    async def mute(asking: AsyncClient) -> None:
        with pytest.raises(DeadlineExceeded):
            await asking.infer("echo", ITEM, timeout_s=0.1)

    against(tmp_path, patient, loading(0.05), loading(0.05), [WELCOME_FRAME, RESULT])
    (tmp_path / "false.sock").unlink()
    against(
        tmp_path, hasty, loading(0.05), loading(WAIT_S_MAX)
    )  # the second pause is longer than the time that is left
    (tmp_path / "false.sock").unlink()
    against(tmp_path, refused, loading(0.05), [b""])
    (tmp_path / "false.sock").unlink()
    against(tmp_path, mute, [b""])


def test_a_session_that_closes_ends_its_request_in_progress(tmp_path: Path) -> None:
    async def ask(path: Path) -> None:
        async with AsyncClient(path) as one, one.session("echo") as session:
            request = asyncio.create_task(session.infer(ITEM))
            await asyncio.sleep(0)  # the request is sent
            await session.close()
            with pytest.raises(SessionLost, match="the session is closed"):
                await asyncio.wait_for(request, WAIT_S_MAX)

    with false_daemon(tmp_path, [WELCOME_FRAME, b""]) as path:
        run(ask(path))


def test_a_session_refuses_a_second_request_while_one_is_in_progress(tmp_path: Path) -> None:
    async def ask(path: Path) -> None:
        async with AsyncClient(path) as one, one.session("echo") as session:
            first, second = await asyncio.gather(session.infer(ITEM), session.infer(ITEM), return_exceptions=True)
            assert isinstance(first, dict)
            assert isinstance(second, RequestError)
            assert "send one request at a time" in str(second)

    with false_daemon(tmp_path, [WELCOME_FRAME, RESULT]) as path:
        run(ask(path))


def test_a_session_that_closes_while_it_moves_leaves_no_connection_open(tmp_path: Path) -> None:
    async def ask(path: Path) -> None:
        async with AsyncClient(path) as one, one.session("echo") as session:
            connected, opened = one._connected, list[Connection]()

            async def closes_meanwhile(*args: Any, **options: Any) -> Connection:
                opened.append(await connected(*args, **options))
                await session.close()
                return opened[0]

            one._connected = closes_meanwhile  # type: ignore[method-assign]
            with pytest.raises(SessionLost, match="the session is closed"):
                await session.infer(ITEM)
            assert opened[0].closed

    with false_daemon(tmp_path, [WELCOME_FRAME, MOVED], [WELCOME_FRAME, RESULT]) as path:
        run(ask(path))
