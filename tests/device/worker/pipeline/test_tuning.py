"""The latency target, `optimize_for` and the instances in a real daemon: the direction of changes, not the speed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgert.tensors import InferResponse
from tests.support.devices import Device, a_device, wait_until

ITEM = np.ones((1, 4), np.float32)
CAP = 16
RUN = {"delay_s": 0.004, "item_s": 0.004}  # a full batch takes 68 ms, a lone request 8 ms


@contextmanager
def clients(device: Device, count: int) -> Iterator[None]:
    """Run `count` clients that send requests without a pause."""
    ended = threading.Event()

    def ask() -> None:
        with device.client() as client:
            while not ended.is_set():
                client.infer("echo", ITEM, cache=False)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def tuner(device: Device) -> dict[str, Any]:
    return dict(device.serving()["batcher"]["tuner"])


def test_the_cap_shrinks_with_many_clients_and_grows_back_with_few() -> None:
    """The target is between the shortest time of a full batch and the time of a lone request."""
    with a_device(f"[serving]\nbatch_max = {CAP}\n[models.echo]\np95_ms = 60.0\n") as device:
        device.put(program=RUN)
        assert tuner(device)["cap"] == CAP
        with clients(device, 2 * CAP):
            wait_until(lambda: tuner(device)["cap"] < CAP, "the target is exceeded: the cap shrinks")
            wait_until(lambda: tuner(device)["state"] == "overloaded", "there is more than any cap can serve")
        with clients(device, 1):
            wait_until(lambda: tuner(device)["state"] == "holds", "a lone client is within the target")
            wait_until(lambda: tuner(device)["cap"] == CAP, "the cap grows back")
        closed = device.serving()["batches_closed"]
        assert closed["cap"] > 0
        assert closed["idle"] > 0


def waited(device: Device) -> list[int]:
    """Send two requests at the same moment over open connections; return the µs that each waited."""
    answers: list[InferResponse] = []
    connected = threading.Barrier(2)

    def ask() -> None:
        with device.client() as client:
            client.metadata("echo")
            connected.wait()
            answers.append(client.infer("echo", ITEM, cache=False, trace=True))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(answer.stages.queue_us for answer in answers)


def test_two_instances_run_two_requests_at_once_and_a_single_instance_lets_the_second_wait() -> None:
    for instances in (2, 1):
        with a_device(f"[serving]\ninstances = {instances}\nbatch_max = 1\n") as device:
            device.put(delay_s=0.3)
            assert device.serving()["batcher"]["instances"] == instances
            if instances == 2:
                assert waited(device) == [0, 0]
            else:  # on a busy machine, one request may arrive after the other request's run
                wait_until(lambda: waited(device)[1] > 0, "the second waits")


@pytest.mark.parametrize(("config", "instances"), [('optimize_for = "throughput"', None), ("instances = 3", 3)])
def test_instances_of_a_real_engine_share_its_session_and_give_right_answers(
    config: str, instances: int | None
) -> None:
    weights = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "copy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        initializer=[weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with a_device(f"[serving]\n{config}\n") as device:
        device.put(engine="onnxruntime", program=model.SerializeToString())
        told = device.serving()
        (learned,) = [
            json.loads(path.read_bytes())
            for path in device.state.learned.iterdir()
            if not path.name.endswith(".size.json")
        ]
        assert learned["learned"]["instances"] == told["batcher"]["instances"] == (instances or told["instances"])
        assert (learned["learned"]["threads"], learned["learned"]["batch_cap"]) == (told["threads"], told["batch_cap"])
        with device.client() as client, ThreadPoolExecutor(8) as pool:

            def answered(number: int) -> bool:
                asked = np.arange(4 * number, dtype=np.float32).reshape(number, 4)
                return bool(np.array_equal(client.infer("echo", asked, cache=False)["y"], asked))

            assert all(pool.map(answered, list(range(1, 9)) * 20))
        assert device.run("check", "echo")["model"] == "echo"
