"""A pause that grows."""

from __future__ import annotations

from edgert.worker.pause import GrowingPause


def test_each_pause_is_twice_as_long_up_to_the_limit_until_it_is_reset() -> None:
    now_s = [10.0]
    pause = GrowingPause(30.0, 100.0, lambda: now_s[0])
    assert not pause.active
    lengths: list[float] = []
    for _ in range(4):
        pause.begin()
        assert pause.active
        lengths.append(pause.left_s)
        now_s[0] += pause.left_s
        assert not pause.active
        assert pause.left_s == 0.0
    assert lengths == [30.0, 60.0, 100.0, 100.0]
    pause.reset()
    pause.begin()
    assert pause.left_s == 30.0
