"""Crashes count for one version, grow the pause, and are forgotten."""

from __future__ import annotations

from edgert.daemon.model.crashes import CRASHES_MAX, QUARANTINE_PAUSES_S, RESTART_PAUSES_S, Crashes


def test_pauses_grow_and_the_last_one_repeats() -> None:
    crashes, pauses = Crashes(), []
    for count in range(1, 10):
        crashes.add("d", stable=False)
        pauses.append(crashes.pause_s)
        assert crashes.too_many is (count >= CRASHES_MAX)
    assert tuple(pauses[:7]) == RESTART_PAUSES_S + QUARANTINE_PAUSES_S
    assert pauses[7:] == [QUARANTINE_PAUSES_S[-1]] * 2


def test_another_version_and_a_stable_worker_begin_anew() -> None:
    crashes = Crashes()
    crashes.add("d", stable=False)
    crashes.add("d", stable=False)
    crashes.starts("d")
    assert crashes.in_a_row == 2
    crashes.add("d", stable=True)
    assert crashes.in_a_row == 1
    crashes.starts("e")
    assert crashes.in_a_row == 0


def test_a_version_is_distrusted_until_a_command_decides_anew() -> None:
    crashes = Crashes()
    crashes.distrust("d")
    assert (crashes.trusts("d"), crashes.trusts("e")) == (False, True)
    crashes.forgive()
    assert crashes.trusts("d")
