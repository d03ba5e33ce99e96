"""Several models share one memory budget on a real device."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.daemon.memory.memory_budget import IDLE_S_MIN
from edgert.errors import DeadlineExceeded, EdgeRTError, Unavailable
from edgert.protocol.control import ask
from tests.support.clients import ITEM, load
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until


def states(device: Device) -> dict[str, str]:
    models = ask(device.state.control_socket, {"op": "status"}, WAIT_S_MAX)["models"]
    return {name: model["state"] for name, model in models.items()}


def use(device: Device, model: str, timeout_s: float = WAIT_S_MAX) -> None:
    with device.client() as client:
        answer = client.infer(model, ITEM, cache=False, timeout_s=timeout_s)
    assert answer["y"].tolist() == ITEM.tolist()


def put(device: Device, **options: Any) -> None:
    """Deploy a model whose worker has more private memory than workers share."""
    device.put(engine="fault", program={"load": {"fault": "leak", "mb": 40}}, **options)


@pytest.fixture(scope="module")
def budget_for_two() -> int:
    """A budget in MB that is enough for two such workers, but not for three."""
    with a_device(programs=True) as device:
        put(device)
        return round(float(device.serving()["memory_mb"]) * 2.4)


def test_models_share_a_memory_budget(budget_for_two: int) -> None:
    config = f"[serving]\nmemory_mb = {budget_for_two}\n[models.pinned]\npinned = true\n"
    with a_device(config, programs=True) as device:
        for model in ("pinned", "one", "two"):
            put(device, model=model)
            time.sleep(IDLE_S_MIN)
        assert states(device) == {"pinned": "ready", "one": "unloaded", "two": "ready"}
        pid = device.serving("two")["pid"]

        use(device, "one")  # the client waits while the model loads
        assert states(device) == {"pinned": "ready", "one": "ready", "two": "unloaded"}
        assert not Path(f"/proc/{pid}").exists()  # its memory is free
        memory = ask(device.state.control_socket, {"op": "status"}, WAIT_S_MAX)["memory"]
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

        device.stop()
        device.start()
        wanted = {"pinned": "ready", "one": "unloaded", "two": "unloaded"}
        wait_until(lambda: states(device) == wanted, "what is pinned is loaded, nothing else")
        use(device, "two")
        assert "unloaded" in device.log()


def test_a_model_in_use_is_not_unloaded_and_the_requests_for_the_other_are_refused_for_now(budget_for_two: int) -> None:
    with a_device(f"[serving]\nmemory_mb = {budget_for_two * 3 // 5}\n", programs=True) as device:
        put(device, model="busy", delay_s=0.01)
        time.sleep(IDLE_S_MIN)
        put(device, model="late")
        time.sleep(IDLE_S_MIN)
        use(device, "busy")

        def refused() -> bool:  # if a busy machine halts `load` for IDLE_S_MIN, the model is not in use
            try:
                use(device, "late", timeout_s=5.0)
            except Unavailable as error:
                return error.retry_after_s is not None and states(device)["busy"] == "ready"
            except DeadlineExceeded:  # the machine had halted the daemon
                return False
            return False

        with load(device, "busy", threads=2) as (_, errors):
            wait_until(refused, "a model in use stays loaded")
        assert errors == []
        use(device, "late")  # nobody uses the other model any more


def test_a_model_larger_than_the_whole_budget_is_refused_once_its_size_is_known() -> None:
    with a_device("[serving]\nmemory_mb = 10\n", programs=True) as device:
        device.put()  # an estimate is no reason for a refusal
        with device.client() as client:
            client.infer("echo", ITEM)
        device.stop()
        device.start()
        with pytest.raises(EdgeRTError, match="memory_mb"):
            use(device, "echo")
        assert states(device) == {"echo": "failed"}


def test_without_a_budget_all_models_are_loaded_one_after_the_other_on_one_processor() -> None:
    with a_device(programs=True) as device:
        device.put(model="one")
        device.put(model="two")
        device.stop()
        processors = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(processors)})  # the daemon inherits this
        try:
            device.start()
        finally:
            os.sched_setaffinity(0, processors)
        seen: list[dict[str, str]] = []

        def loaded() -> bool:
            seen.append(states(device))
            return set(seen[-1].values()) == {"ready"}

        wait_until(loaded, "both are loaded")
        assert {"one": "loading", "two": "loading"} not in seen


def test_a_new_version_loads_beside_the_old_version_although_the_budget_holds_only_one(budget_for_two: int) -> None:
    with a_device(f"[serving]\nmemory_mb = {budget_for_two // 2}\n", programs=True) as device:
        put(device, delay_s=0.002)
        with load(device, threads=2) as (releases, errors):
            put(device, release=2, delay_s=0.002)
            wait_until(lambda: 2 in releases, "the new one serves")
        assert errors == []


def test_alternating_requests_for_two_models_are_all_answered(budget_for_two: int) -> None:
    """The budget is enough for only one of the two models. Answers are slow, but none is lost."""
    with a_device(f"[serving]\nmemory_mb = {budget_for_two // 2}\n", programs=True) as device:
        for model in ("one", "two"):
            put(device, model=model)
            time.sleep(IDLE_S_MIN)
        with device.client() as client:
            for turn in range(4):
                model = ("one", "two")[turn % 2]
                assert np.array_equal(client.infer(model, ITEM * turn, cache=False)["y"], ITEM * turn)
