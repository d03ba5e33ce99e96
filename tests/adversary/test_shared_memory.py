"""A client requests shared memory on all its connections, writes all of the memory, and keeps it."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from edgert.protocol import wire
from edgert.protocol.sharing import receive_with_descriptor
from tests.support.clients import raw
from tests.support.devices import Device, a_device, wait_until

CONNECTIONS = 60
BUDGET_MB = 50  # a quarter of `worker_mb_max`
HELLO = wire.json_frame(wire.HELLO, {"model": "echo", "shared": True})


def take(device: Device, held: contextlib.ExitStack) -> int | None:
    """Connect while `held` is open. Fill the received memory, and return its open descriptor."""
    sock = held.enter_context(raw(device))
    sock.sendall(HELLO)
    _, descriptor = receive_with_descriptor(sock, memoryview(bytearray(8192)))
    if descriptor is not None:
        size = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, size) as area:
            area.write(b"x" * size)
    return descriptor


def held_mb(descriptors: list[int]) -> float:
    return sum(os.fstat(descriptor).st_blocks for descriptor in descriptors) * 512 / 1e6


def test_shared_memory_is_limited_and_reported_in_the_status_and_freed_at_the_end() -> None:
    with a_device(f"[serving]\nworker_mb_max = {4 * BUDGET_MB}\n") as device:
        device.put(item_shape=(400, 400))  # 10 MB for each connection
        with contextlib.ExitStack() as descriptors:
            with contextlib.ExitStack() as connections:
                taken = [one for _ in range(CONNECTIONS) if (one := take(device, connections)) is not None]
                for one in taken:
                    descriptors.callback(os.close, one)
                assert 5 < held_mb(taken) <= BUDGET_MB / 2
                memory = device.run("status")["daemon"]["memory"]
                assert memory["shared_mb"] == round(held_mb(taken), 1)
                # A new app is served over its socket.
                array = np.ones((1, 400, 400), np.float32)
                with device.client() as client:
                    np.testing.assert_array_equal(client.infer("echo", array)["y"], array)
            wait_until(
                lambda: held_mb(taken) == 0, "the memory of ended connections is free, although its holder keeps it"
            )
            assert device.serving()["shared_bytes"] == 0
