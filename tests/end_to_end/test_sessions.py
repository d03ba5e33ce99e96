"""Sessions on a real device: the memory that the daemon keeps between requests, and the end of a session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert import AsyncClient, Client
from edgert.bundle.rules import Classify, Smooth
from edgert.bundle.signal_rules import Sound
from edgert.errors import Overloaded, RequestError, SessionLost
from tests.support.devices import Device, a_device, wait_until

CONFIG = "[serving]\nsessions_max = 20\nbatch_max = 8\n"
WINDOWS = Sound("x", 16_000, 8, step=4, lead=2, features="samples")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device(CONFIG) as device:
        device.put(model="sums", op="add", state_id="")
        device.put(model="slow", op="add", state_id="v1", delay_s=0.005)
        device.put(model="windows", op="add", state_id="", item_shape=(8,), rules={"sound": WINDOWS})
        device.put(model="overlap", op="copy", item_shape=(8,), rules={"sound": WINDOWS})
        rules = {"sound": WINDOWS, "classify": Classify("y", smooth=Smooth("mean", 3))}
        device.put(model="smooth", op="copy", item_shape=(8,), rules=rules)
        device.put(model="echo")
        yield device


def item(value: float) -> NDArray[np.float32]:
    return np.full(4, value, np.float32)


def test_a_request_of_a_session_begins_with_the_state_of_the_previous_request(client: Client) -> None:
    with client.session("sums") as stream:
        assert [stream.infer(item(n))["y"][0] for n in (1, 2, 3)] == [1, 3, 6]
        assert stream.infer(np.stack([item(10), item(20)]))["y"][:, 0].tolist() == [
            16,
            36,
        ]  # the model runs the items one after the other
    with client.session("sums") as stream:
        assert stream.infer(item(1))["y"][0] == 1


def test_an_app_sees_no_tensor_of_the_state(client: Client) -> None:
    told = client.metadata("sums")
    assert [[spec["name"] for spec in told[key]] for key in ("inputs", "outputs")] == [["x"], ["y"]]
    assert list(client.infer("sums", item(1))) == ["y"]


def test_a_request_without_a_session_begins_with_a_state_of_zeros(client: Client) -> None:
    for _ in range(2):
        assert client.infer("sums", np.stack([item(1), item(2)]), cache=False)["y"][:, 0].tolist() == [1, 3]


@pytest.mark.parametrize("size", [1, 3, 4, 9, 40])
@pytest.mark.parametrize("model", ["overlap", "windows"])
def test_chunks_of_any_length_give_the_windows_of_the_whole_signal(client: Client, model: str, size: int) -> None:
    signal = np.random.default_rng(0).random(40).astype(np.float32)
    whole = client.infer(model, signal)["y"]
    assert whole.shape == (9, 8)
    with client.session(model) as stream:
        answers = [stream.infer(signal[at : at + size])["y"] for at in range(0, len(signal), size)]
    np.testing.assert_array_equal(np.concatenate(answers), whole)
    assert answers[0].shape == (len(answers[0]), 8)  # even if no window is complete


@pytest.mark.parametrize("size", [1, 5, 16])
def test_windows_are_smoothed_over_the_requests_of_a_session(client: Client, size: int) -> None:
    signal = np.random.default_rng(1).random(40).astype(np.float32) * 3
    whole = client.infer("smooth", signal)["y_probabilities"]
    with client.session("smooth") as stream:
        answers = [stream.infer(signal[at : at + size])["y_probabilities"] for at in range(0, len(signal), size)]
    np.testing.assert_array_equal(np.concatenate([answer for answer in answers if len(answer)]), whole)
    assert len(whole) == 9


def test_a_request_that_fails_leaves_the_state_unchanged(client: Client) -> None:
    with client.session("windows") as stream:
        first = stream.infer(np.ones(7, np.float32))["y"]
        with pytest.raises(RequestError, match="not finite"):
            stream.infer(np.array([np.nan], np.float32))
        with pytest.raises(RequestError):
            stream.infer(np.zeros((2, 3), np.float32))
        with pytest.raises(RequestError, match="not as a file"):
            stream.infer(b"RIFF")
        again = stream.infer(np.ones(3, np.float32))["y"]
    assert first[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert again[0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]


def test_a_model_without_state_refuses_sessions(client: Client) -> None:
    with pytest.raises(RequestError, match="send its requests without a session"):
        client.session("echo")


def test_interleaved_sessions_share_batches_and_give_the_same_answers_as_alone(device: Device) -> None:
    def sums(seed: int) -> None:
        values = np.random.default_rng(seed).integers(1, 100, 50)
        with device.client() as client, client.session("slow") as stream:
            got = [float(stream.infer(item(value))["y"][0]) for value in values]
        assert got == np.cumsum(values).tolist()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sums, range(8)))
    assert max(int(items) for items in device.serving("slow")["runs"]) > 1
    wait_until(lambda: device.serving("slow")["sessions"] == 0, "all sessions have ended")


def test_every_session_keeps_its_state_in_hot_swaps_under_load(device: Device) -> None:
    def sums_until(release: int) -> None:
        total, answered_by = 0, 0
        with device.client() as client, client.session("slow") as stream:
            while answered_by < release:
                total += 1
                answer = stream.infer(item(1), trace=True)
                assert answer.outputs["y"][0] == total
                answered_by = answer.release

    with ThreadPoolExecutor(6) as pool:
        sums = [pool.submit(sums_until, 3) for _ in range(6)]
        for release in (2, 3):
            device.put(model="slow", op="add", state_id="v1", delay_s=0.005, release=release)
        for each in sums:
            each.result()


def test_a_session_that_finds_no_place_at_first_continues_later() -> None:
    with a_device("[serving]\nsessions_max = 1\n") as device, device.client() as client:
        device.put(model="sums", op="add", state_id="v1")
        with client.session("sums") as stream:
            stream.infer(item(1))
            device.replace("sums", op="add", state_id="v1", release=2)
            with client.session("sums"), pytest.raises(Overloaded, match="sessions_max"):
                stream.infer(item(2))
            wait_until(lambda: device.serving("sums")["sessions"] == 0, "there is a place")
            assert stream.infer(item(2))["y"][0] == 3
            stream.close()
            with pytest.raises(SessionLost, match="closed"):
                stream.infer(item(2))


def test_more_sessions_than_the_limit_are_refused_with_its_name(device: Device, client: Client) -> None:
    wait_until(lambda: device.serving("sums")["sessions"] == 0, "the sessions of other tests have ended")
    streams = [client.session("sums") for _ in range(20)]
    figures = device.serving("sums")
    assert (figures["sessions"], figures["session_bytes"]) == (20, 20 * 16)
    with pytest.raises(Overloaded, match=r"20 sessions, the limit \(\[serving\] sessions_max\)"):
        client.session("sums")
    assert client.infer("sums", item(1))["y"][0] == 1
    streams.pop().close()
    wait_until(lambda: device.serving("sums")["sessions"] == 19, "a place is free")
    client.session("sums").close()
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(("before", "after", "goes_on"), [("", "", False), ("v1", "v2", False), ("v1", "v1", True)])
def test_a_session_survives_a_new_version_only_if_the_version_continues_the_state(
    before: str, after: str, goes_on: bool
) -> None:
    with a_device() as device, device.client() as client:
        device.put(model="sums", op="add", state_id=before)
        with client.session("sums") as stream:
            assert stream.infer(item(1))["y"][0] == 1
            device.replace("sums", op="add", state_id=after, release=2)
            if goes_on:
                assert stream.infer(item(2), trace=True).outputs["y"][0] == 3
                assert stream.infer(item(2), trace=True).release == 2
                return
            with pytest.raises(SessionLost, match="started with release 1, which no longer serves"):
                stream.infer(item(2))
            with pytest.raises(SessionLost):
                stream.infer(item(2))
        with client.session("sums") as stream:
            assert stream.infer(item(2))["y"][0] == 2


def test_a_session_ends_with_its_worker(device: Device) -> None:
    with a_device() as device, device.client() as client:
        device.put(model="sums", op="add", state_id="v1")
        with client.session("sums") as stream:
            stream.infer(item(1))
            os.kill(device.serving("sums")["pid"], signal.SIGKILL)
            with pytest.raises(SessionLost, match="start a new session"):
                stream.infer(item(1))
        with client.session("sums") as stream:
            assert stream.infer(item(2))["y"][0] == 2

        async def ended() -> None:
            async with AsyncClient(device.socket) as client, client.session("sums") as stream:
                await stream.infer(item(1))
                os.kill(device.serving("sums")["pid"], signal.SIGKILL)
                with pytest.raises(SessionLost, match="start a new session"):
                    await stream.infer(item(1))

        asyncio.run(ended())


def test_an_idle_session_ends_with_an_error_that_names_the_limit() -> None:
    with a_device("[serving]\nsession_idle_s = 0.2\n") as device, device.client() as client:
        device.put(model="sums", op="add", state_id="")
        with client.session("sums") as stream:
            wait_until(lambda: device.serving("sums")["sessions"] == 0, "the session has ended")
            with pytest.raises(SessionLost, match=r"session_idle_s\): start a new session"):
                stream.infer(item(1))


# --- asyncio --------------------------------------------------------------------------------------


def test_an_asyncio_client_has_simultaneous_sessions(device: Device) -> None:
    async def sums(client: AsyncClient, seed: int) -> None:
        values = np.random.default_rng(seed).integers(1, 100, 50)
        async with client.session("sums") as stream:
            got = [(await stream.infer(item(value)))["y"][0] for value in values]
        assert got == np.cumsum(values).tolist()

    async def together() -> None:
        async with AsyncClient(device.socket) as client:
            await asyncio.gather(*(sums(client, seed) for seed in range(8)))
            assert (await client.infer("sums", item(1)))["y"][0] == 1

    asyncio.run(together())


@pytest.mark.parametrize("waits", [False, True])
def test_an_asyncio_session_moves_with_its_state(waits: bool) -> None:
    async def across_versions(device: Device) -> None:
        async with AsyncClient(device.socket) as client, client.session("sums") as stream:
            await stream.infer(item(1))
            device.replace("sums", op="add", state_id="v1", release=2)
            if waits:  # the loop sees MOVED before the next request
                await asyncio.sleep(0.2)
            answer = await stream.infer(item(2), trace=True)
            assert (answer.outputs["y"][0], answer.release) == (3, 2)
            assert (await stream.infer(item(3)))["y"][0] == 6

    with a_device() as device:
        device.put(model="sums", op="add", state_id="v1")
        asyncio.run(across_versions(device))


def test_an_asyncio_session_keeps_its_memory_after_a_move_and_a_refused_request() -> None:
    async def across_versions(device: Device) -> None:
        async with AsyncClient(device.socket) as client, client.session("sums") as stream:
            await stream.infer(item(1))
            for release in (2, 3):  # at the second move, the worker has not seen the session's memory yet
                device.replace("sums", op="add", state_id="v1", release=release)
                await asyncio.sleep(0.2)  # the loop sees MOVED
                with pytest.raises(RequestError, match="takes FP32"):
                    await stream.infer(np.zeros((1, 9), np.float32))
            assert (await stream.infer(item(2)))["y"][0] == 3

    with a_device() as device:
        device.put(model="sums", op="add", state_id="v1")
        asyncio.run(across_versions(device))


def test_the_error_of_an_asyncio_session_gives_the_reason_of_its_end() -> None:
    async def ended(device: Device) -> None:
        async with AsyncClient(device.socket) as client:
            stream = client.session("sums")
            with pytest.raises(SessionLost, match="has not started"):
                await stream.infer(item(1))
            async with stream:
                while device.serving("sums")["sessions"]:  # the daemon ends it after 0.2 s
                    await asyncio.sleep(0.1)
                with pytest.raises(SessionLost, match="session_idle_s"):
                    await stream.infer(item(1))

    with a_device("[serving]\nsession_idle_s = 0.2\n") as device:
        device.put(model="sums", op="add", state_id="v1")
        asyncio.run(ended(device))
