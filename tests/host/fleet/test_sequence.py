"""The sequence numbers of a stream identify new, repeated and missing reports."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from edgert_deploy.fleet import sequence as seq
from edgert_deploy.fleet.sequence import SeqTracker, StreamTracker


@given(st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=60))
def test_a_tracker_counts_each_sequence_number_once_and_counts_missing_numbers(arrivals: list[int]) -> None:
    tracker = SeqTracker()
    first = arrivals[0]
    new = [seq for seq in arrivals if tracker.is_new(seq)]
    expected = {seq for seq in arrivals if seq >= first}  # earlier messages than the first one are unknown
    assert len(new) == len(set(new))
    assert set(new) == expected
    assert tracker.missing == max(arrivals) - first + 1 - len(expected)


def test_a_counter_that_begins_anew_is_not_taken_for_lost_messages() -> None:
    tracker = SeqTracker()
    assert [tracker.is_new(seq) for seq in (1, 2, 2**40, 2**40 + 1, 2**40)] == [True, True, True, True, False]
    assert (tracker.missing, tracker.lost_spools) == (0, 1)


def test_every_lost_spool_is_counted_as_a_gap() -> None:
    tracker = SeqTracker()
    # The third spool begins below the second, and one of its reports never arrives.
    assert all(tracker.is_new(seq) for seq in (1, 2, 2**40, 2**40 + 1, 2**35, 2**35 + 2))
    assert (tracker.missing, tracker.lost_min) == (1, 3)
    assert not tracker.is_new(2**35)


def test_a_large_gap_is_counted_in_bounded_memory() -> None:
    tracker = SeqTracker()
    tracker.is_new(1)
    tracker.is_new(1_000_002)
    assert tracker.missing == 1_000_000
    assert [tracker.is_new(number) for number in (2, 500_000, 1_000_001, 500_000)] == [True, True, True, False]
    every_other = range(1_000_004, 1_010_000, 2)
    assert all(tracker.is_new(number) for number in every_other)
    assert tracker.missing == 1_000_000 - 3 + len(every_other)
    assert len(tracker._gaps or ()) == seq.GAPS_MAX


def test_reports_between_two_boots_count_as_missing_and_may_arrive_late() -> None:
    numbers = StreamTracker()
    assert all(numbers.is_new("b1", seq) for seq in (1, 2, 3))
    assert numbers.is_new("b2", 8)
    assert numbers.lost_min == 4
    assert numbers.is_new("b1", 5)  # a late report from the end of the first boot
    assert numbers.is_new("b1", 4)
    assert not numbers.is_new("b1", 4)
    assert numbers.lost_min == 2
    assert numbers.is_new("b3", 9)
    assert numbers.lost_min == 2


def test_reports_that_a_broker_delays_beyond_reboots_count_once_and_not_as_missing() -> None:
    for seed in range(300):
        dice, boot, lost = random.Random(seed), 0, 0
        arrivals = [(0.0, "b0", 0)]
        for number in range(1, 40):
            boot += dice.random() < 0.1
            if number < 39 and dice.random() < 0.1:
                lost += 1
                continue
            for _ in range(1 + (dice.random() < 0.2)):
                arrivals.append((number + dice.choice((0, 0, 0, 3, 12)), f"b{boot}", number))
        numbers = StreamTracker()
        new = sum(numbers.is_new(boot, number) for _, boot, number in sorted(arrivals))
        assert (new, numbers.lost_min) == (40 - lost, lost), seed


def test_numbers_that_a_device_uses_again_after_a_power_cut_count_as_new() -> None:
    numbers = StreamTracker()
    assert all(numbers.is_new("b1", seq) for seq in range(1, 11))
    assert all(numbers.is_new("b2", seq) for seq in range(8, 13))
    assert numbers.lost_min == 0
    assert numbers.is_new("b3", 2**40)  # the spool was lost, with an unknown number of reports
    assert numbers.lost_min == 1


def test_the_losses_of_many_boots_are_remembered_in_bounded_memory() -> None:
    numbers = StreamTracker()
    assert all(numbers.is_new(f"b{boot}", 3 * boot) for boot in range(100))
    assert numbers.lost_min == 2 * 99
    assert len(numbers._trackers) == seq.BOOTS_KEPT_MAX
