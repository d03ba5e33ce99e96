"""The budget of shared memory: a limit for the worker and for each user, and areas freed at a connection's end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from edgert.config import ServingConfig
from edgert.protocol.sharing import SharedArea
from edgert.worker.connections.shared_memory import SHARED_BYTES_MAX, UNREAD_S, SharedMemoryBudget, shared_bytes_max

HALF = 64 * 1024
AREA = SharedArea.bytes_for(HALF)


class Areas:
    """A budget for eight areas, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.budget = SharedMemoryBudget(8 * AREA, lambda: self.now_s)
        self.descriptors: list[int] = []

    def make(self, uid: int) -> SharedArea | None:
        made = self.budget.create_area(uid, HALF)
        if made is None:
            return None
        self.descriptors.append(made[1])
        return made[0]

    def used_bytes(self) -> int:
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self.descriptors)


@pytest.fixture
def areas() -> Iterator[Areas]:
    made = Areas()
    yield made
    for descriptor in made.descriptors:
        os.close(descriptor)


def test_one_user_gets_half_of_the_budget_and_all_users_together_get_the_whole(areas: Areas) -> None:
    assert [areas.make(1) is not None for _ in range(5)] == [True] * 4 + [False]
    assert [areas.make(2) is not None for _ in range(3)] == [True] * 3
    assert areas.make(3) is not None
    assert areas.make(4) is None
    assert areas.budget.reserved_bytes == 8 * AREA


def test_the_end_of_a_connection_frees_pages_that_its_client_keeps(areas: Areas) -> None:
    area = areas.make(1)
    assert area is not None
    area.request[:] = area.response[:] = b"x" * HALF
    assert areas.used_bytes() == AREA
    areas.budget.release(area, unread=False)
    assert (areas.used_bytes(), areas.budget.reserved_bytes) == (0, 0)


def test_an_answer_that_may_be_unread_stays_for_a_while(areas: Areas) -> None:
    area = areas.make(1)
    assert area is not None
    area.response[:] = b"x" * HALF
    areas.budget.release(area, unread=True)
    areas.now_s = UNREAD_S - 1
    assert areas.budget.reserved_bytes == AREA
    assert bytes(area.response[:1]) == b"x"
    areas.now_s = UNREAD_S
    assert (areas.budget.reserved_bytes, areas.used_bytes()) == (0, 0)


def test_the_budget_follows_the_limit_of_the_worker() -> None:
    assert shared_bytes_max(ServingConfig()) <= SHARED_BYTES_MAX
    assert shared_bytes_max(ServingConfig(worker_mb_max=40.0)) == 10_000_000
