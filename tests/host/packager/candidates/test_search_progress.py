"""A search for layers in float says how many steps and how much time are left."""

from __future__ import annotations

import pytest

from edgert_deploy.packager.candidates.search_progress import LINE_S, SearchProgress, attempts_max, next_count


class World:
    """A search's progress, its lines, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.lines: list[str] = []
        self.progress = SearchProgress(self.lines.append, "box", lambda: self.now_s)


def test_the_measured_layers_are_reported_with_the_time_left() -> None:
    world = World()
    world.progress.begin()
    for number in range(1, 41):
        world.now_s += LINE_S / 3
        world.progress.measured(number, 40)
    assert world.lines[:2] == [
        "box: 1 of 40 layers measured in 5s, at most about 3m left",
        "box: 4 of 40 layers measured in 20s, at most about 3m left",
    ]
    assert len(world.lines) == 13
    assert world.lines[-1] == "box: 37 of 40 layers measured in 3m, at most about 15s left"


def test_each_candidate_is_reported_with_the_number_of_candidates_and_the_time_left() -> None:
    world = World()
    world.progress.begin()
    world.progress.candidate("1 layer in float", 4)
    world.now_s += 300.5
    world.progress.candidate("2 layers in float", 3)
    assert world.lines == [
        "box: candidate 1 of at most 4: 1 layer in float",
        "box: candidate 2 of at most 4 in 5m, at most about 15m left: 2 layers in float",
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 60])
def test_no_search_needs_more_builds_than_announced(most: int) -> None:
    needed = []
    for passes_from in range(1, most + 2):  # the smallest number of layers in float that passes
        fails, passes, builds = 0, 0, 0
        while passes != fails + 1 and (passes or fails < most):
            count = next_count(fails, passes, most)
            builds += 1
            fails, passes = (fails, count) if count >= passes_from else (count, passes)
        needed.append(builds)
    assert max(needed) == attempts_max(0, 0, most)
