"""Several models, one memory budget: who is loaded when, who goes, and what is remembered of their sizes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edgert.config import parse_config
from edgert.daemon.memory import (
    IDLE_S_MIN,
    WORKER_BASE_MB,
    Claim,
    LearnedSizes,
    Room,
    estimated_mb,
    make_room,
    process_mb,
)
from edgert.errors import ConfigInvalid, EdgeRTError, Unavailable
from edgert.protocol.control import ask
from tests.support.clients import ITEM, load
from tests.support.devices import Device, a_device, wait_until

NOW = 1000.0


def claim(model: str, mb: float, idle_s: float = 100.0, **kinds: bool) -> Claim:
    return Claim(model, mb, NOW - idle_s, **kinds)


@pytest.mark.parametrize(
    ("need", "claims", "room"),
    [
        (50, [], Room(True)),
        (50, [claim("a", 50)], Room(True)),
        (50, [claim("a", 60)], Room(False, ("a",))),
        (50, [claim("new", 40, 5), claim("old", 40, 9)], Room(False, ("old",))),
        (90, [claim("new", 40, 5), claim("old", 40, 9)], Room(False, ("old", "new"))),
        (50, [claim("a", 60, fixed=True)], Room(False)),
        (50, [claim("a", 60, idle_s=IDLE_S_MIN / 2)], Room(False)),
        (50, [claim("a", 60, leaving=True)], Room(False)),
        (50, [claim("pinned", 30, fixed=True), claim("a", 40)], Room(False, ("a",))),
        (80, [claim("pinned", 30, fixed=True), claim("a", 40)], Room(False)),
    ],
    ids=["empty", "fits", "one-goes", "oldest-goes", "two-go", "fixed", "in-use", "on-its-way", "beside", "in-vain"],
)
def test_the_least_recently_used_go_and_only_as_many_as_must(need: float, claims: list[Claim], room: Room) -> None:
    assert make_room(need, 100, claims, NOW) == room


def test_sizes_are_remembered_by_the_next_process(tmp_path: Path) -> None:
    LearnedSizes(tmp_path / "learned").learn("d" * 64, 55.5)
    again = LearnedSizes(tmp_path / "learned")
    assert again.of("d" * 64) == 55.5
    assert again.of("e" * 64) is None
    again.learn("d" * 64, 56.0)
    assert again.of("d" * 64) == 55.5  # not worth a write
    next((tmp_path / "learned").iterdir()).write_text("{")
    assert LearnedSizes(tmp_path / "learned").of("d" * 64) is None


def test_a_size_is_estimated_while_an_install_comes_and_goes(tmp_path: Path) -> None:
    stop, stage = threading.Event(), tmp_path / "stage"

    def come_and_go() -> None:
        while not stop.is_set():
            (stage / "engine").mkdir(parents=True)
            for number in range(50):
                (stage / "engine" / str(number)).touch()
            shutil.rmtree(stage)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {estimated_mb(tmp_path) for _ in range(500)} == {WORKER_BASE_MB}
    finally:
        stop.set()
        thread.join()


def test_a_process_has_a_size_and_one_that_is_gone_has_none() -> None:
    size = process_mb(os.getpid())
    assert size is not None
    assert 5 < size < 5000
    assert process_mb(2**22 + 1) is None


def test_pinned_models_stand_in_the_configuration() -> None:
    head = 'device = "d-1"\nprofile = "p"\n'
    config = parse_config(f"{head}[models.digits]\npinned = true\n", "here")
    assert (config.model("digits").pinned, config.model("other").pinned) == (True, False)
    for wrong in ("[models.digits]\npined = true\n", "[models]\ndigits = 1\n", "models = 1\n"):
        with pytest.raises(ConfigInvalid):
            parse_config(head + wrong, "here")


def states(device: Device) -> dict[str, str]:
    models = ask(device.state.control_socket, {"op": "status"}, 10.0)["models"]
    return {name: model["state"] for name, model in models.items()}


def use(device: Device, model: str, timeout_s: float = 20.0) -> None:
    with device.client() as client:
        answer = client.infer(model, ITEM, cache=False, timeout_s=timeout_s)
    assert answer["y"].tolist() == ITEM.tolist()


@pytest.fixture(scope="module")
def budget_for_two() -> int:
    """A budget in MB that holds two null workers and not three."""
    with a_device() as device:
        device.put()
        return round(float(device.serving()["memory_mb"]) * 2.5)


def test_models_share_a_budget(budget_for_two: int) -> None:
    config = f"[serving]\nmemory_mb = {budget_for_two}\n[models.pinned]\npinned = true\n"
    with a_device(config) as device:
        for model in ("pinned", "one", "two"):
            device.put(model=model)
            time.sleep(IDLE_S_MIN)
        assert states(device) == {"pinned": "ready", "one": "unloaded", "two": "ready"}
        pid = device.serving("two")["pid"]

        use(device, "one")  # the client waits while it is loaded
        assert states(device) == {"pinned": "ready", "one": "ready", "two": "unloaded"}
        assert not Path(f"/proc/{pid}").exists()  # its memory is back
        memory = ask(device.state.control_socket, {"op": "status"}, 10.0)["memory"]
        assert memory["limit_mb"] == budget_for_two
        assert 0 < memory["used_mb"] <= budget_for_two

        time.sleep(IDLE_S_MIN)
        with device.client() as client:  # a connection that was open moves, and finds the model again
            client.infer("one", ITEM)
            time.sleep(IDLE_S_MIN)
            use(device, "two")
            time.sleep(IDLE_S_MIN)
            assert client.infer("one", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        device.run("check", "two")

        device.run("stop")
        device.run("start")
        wanted = {"pinned": "ready", "one": "unloaded", "two": "unloaded"}
        wait_until(lambda: states(device) == wanted, "what is pinned is loaded, nothing else")
        use(device, "two")
        assert "unloaded" in device.log()


def test_a_model_in_use_is_not_unloaded_and_the_other_asks_again(budget_for_two: int) -> None:
    with a_device(f"[serving]\nmemory_mb = {budget_for_two * 3 // 5}\n") as device:
        device.put(model="busy", delay_s=0.01)
        time.sleep(IDLE_S_MIN)
        device.put(model="late")
        time.sleep(IDLE_S_MIN)
        use(device, "busy")
        with load(device, "busy", threads=2) as (_, errors):
            with pytest.raises(Unavailable) as caught:
                use(device, "late", timeout_s=2.0)
            assert caught.value.retry_after_s is not None
            assert states(device)["busy"] == "ready"
        assert errors == []
        use(device, "late")  # nobody asks the other any more


def test_what_is_larger_than_the_whole_budget_is_refused_once_that_is_known() -> None:
    with a_device("[serving]\nmemory_mb = 10\n") as device:
        device.put()  # an estimate refuses nothing
        with device.client() as client:
            client.infer("echo", ITEM)
        device.run("stop")
        device.run("start")
        began = time.monotonic()
        with pytest.raises(EdgeRTError, match="memory_mb"):
            use(device, "echo")
        assert time.monotonic() - began < 10
        assert states(device) == {"echo": "failed"}


def test_without_a_budget_every_model_is_loaded_at_once() -> None:
    with a_device() as device:
        device.put(model="one")
        device.put(model="two")
        device.run("stop")
        device.run("start")
        wait_until(lambda: set(states(device).values()) == {"ready"}, "both are loaded")


def test_a_new_version_is_swapped_in_beside_the_old_one_even_where_the_budget_holds_one(budget_for_two: int) -> None:
    with a_device(f"[serving]\nmemory_mb = {budget_for_two // 2}\n") as device:
        device.put(delay_s=0.002)
        with load(device, threads=2) as (releases, errors):
            device.put(release=2, delay_s=0.002)
            wait_until(lambda: 2 in releases, "the new one serves")
        assert errors == []


def test_requests_that_take_turns_between_models_are_all_answered(budget_for_two: int) -> None:
    """Only one of the two fits: slow, and no answer lost."""
    with a_device(f"[serving]\nmemory_mb = {budget_for_two // 2}\n") as device:
        for model in ("one", "two"):
            device.put(model=model)
            time.sleep(IDLE_S_MIN)
        with device.client() as client:
            for turn in range(4):
                model = ("one", "two")[turn % 2]
                assert np.array_equal(client.infer(model, ITEM * turn, cache=False)["y"], ITEM * turn)
