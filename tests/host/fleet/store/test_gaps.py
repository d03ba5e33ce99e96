"""Every answer has the reports that were sent and never arrived: their number, time and device."""

from __future__ import annotations

import random
from itertools import pairwise

from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.gaps import Gap
from edgert_deploy.fleet.store.query import FleetQuery, Question
from tests.support.fleet import NOW_MS, Pi, Sent, ask, record, recording, without


def minutes(pi: Pi, since: int, until: int) -> Sent:
    """Return windows of one request each, from `since` to before `until` minutes ago."""
    return [message for minute in range(since, until, -1) for message in pi.window(NOW_MS - minute * MINUTE_MS, [1.0])]


def missing(url: str, hours: float, **where: str) -> dict[str, int]:
    return {
        device: count for answer in ask(url, hours, (), 0, False, **where) for device, count in answer.missing.items()
    }


def test_gaps_are_counted_for_their_device_and_their_time(store_url: str) -> None:
    whole, holed = Pi("pi-1"), Pi("pi-2")
    record(
        store_url,
        whole.info() + minutes(whole, 100, 0) + holed.info() + without(minutes(holed, 100, 0), *range(41, 54)),
    )
    assert missing(store_url, 2) == {"plant-a/pi-2": 13}
    assert missing(store_url, 2, device="pi-1") == {}
    assert missing(store_url, 0.5) == {}
    (all_day,) = ask(store_url, 2, ("version",))
    assert (all_day.windows, sum(all_day.missing.values())) == (187, 13)
    steps = {answer.start_ms: answer for answer in ask(store_url, 2, ("device",), step_min=10, device="pi-2")}
    assert sum(sum(step.missing.values()) for step in steps.values()) == 13
    assert {
        10 - step.windows: sum(step.missing.values()) for step in steps.values() if step.windows < 10 and step.missing
    } == {10: 10, 3: 3}
    hole = NOW_MS - 57 * MINUTE_MS  # a period without any report
    query = FleetQuery(store_url)
    (answer,) = query.answer(Question(hole, hole + 5 * MINUTE_MS, ("device",), {"device": "pi-2"}), NOW_MS)
    assert (answer.windows, answer.latency.count, answer.missing) == (0, 0, {"plant-a/pi-2": 5})
    query.close()


def test_late_reports_close_their_gap_in_any_order(store_url: str) -> None:
    dice, pi = random.Random(5), Pi("pi-1")
    sent = minutes(pi, 50, 0)
    late = [message for message in sent if message not in without(sent, *range(10, 31))]
    record(store_url, pi.info() + [message for message in sent if message not in late])
    assert missing(store_url, 1) == {"plant-a/pi-1": 21}
    dice.shuffle(late)
    half = [message for message in late if message not in without(late, *range(10, 31, 2))]
    record(store_url, half)
    assert missing(store_url, 1) == {"plant-a/pi-1": 10}
    record(store_url, late + sent)
    assert missing(store_url, 1) == {}


def test_a_rollback_and_another_deployment_leave_no_gap(store_url: str) -> None:
    old, new = Pi("pi-1"), Pi("pi-1", version="r2")
    sent = old.info()
    for n, pi in enumerate((old, new, old, new, old)):
        other = new if pi is old else old
        pi.seq = max(pi.seq, other.seq)
        sent = sent + minutes(pi, 30 - 2 * n, 28 - 2 * n)
        record(store_url, sent)  # each time, the reports from before are repeated
    assert missing(store_url, 1) == {}
    old.seq += 3
    record(store_url, minutes(old, 10, 8))
    assert missing(store_url, 1) == {"plant-a/pi-1": 3}


def test_reports_that_a_broker_delays_over_rollbacks_and_reboots_do_not_count_as_missing(store_url: str) -> None:
    """A cluster of brokers may send a report twice, or minutes after later reports."""
    dice, lost = random.Random(7), dict[str, int]()
    for device in (f"pi-{n}" for n in range(12)):
        pi, sent = Pi(device), list[tuple[float, Sent]]()
        for minute in range(40, 0, -1):
            pi.version = dice.choice(("r1", "r2")) if minute % 5 == 0 else pi.version
            pi.boot = f"b{minute}" if dice.random() < 0.05 else pi.boot
            window = minutes(pi, minute, minute - 1)
            if minute < 40 and dice.random() < 0.1 and minute > 1:
                lost[f"plant-a/{device}"] = lost.get(f"plant-a/{device}", 0) + 1
                continue
            copies = 1 + (minute < 40) * (dice.random() < 0.2)
            sent += [(-minute + (minute < 40) * dice.choice((0, 0, 0, 5, 12)), window) for _ in range(copies)]
        ordered = [window for _, window in sorted(sent, key=lambda each: each[0])]
        with recording(
            store_url
        ) as take:  # a recorder for each device: the next recorder continues with the stored state
            while ordered:
                some, ordered = ordered[: (count := dice.randrange(1, 9))], ordered[count:]
                take([message for window in some for message in window])
    assert missing(store_url, 1) == lost


def test_reports_between_two_boots_or_two_versions_count_as_missing(store_url: str) -> None:
    before, after = Pi("pi-1"), Pi("pi-1", version="r2", boot="b2")
    sent = before.info() + minutes(before, 30, 20)
    after.seq = before.seq + 4
    record(store_url, sent + minutes(after, 16, 0))
    assert missing(store_url, 1) == missing(store_url, 1, version="r2") == {"plant-a/pi-1": 4}
    again = Pi("pi-1", version="r2", boot="b3")
    again.seq = after.seq - 2  # after a power cut, the device uses the last numbers again
    record(store_url, minutes(again, 2, 0))
    assert missing(store_url, 1) == {"plant-a/pi-1": 4}
    lost = Pi("pi-1", version="r2", boot="b4")
    lost.seq = 2**40  # the spool was lost, with an unknown number of reports
    record(store_url, minutes(lost, 1, 0))
    assert missing(store_url, 1) == {"plant-a/pi-1": 5}


def test_a_gap_of_any_size_is_spread_over_the_time_between_its_neighbours() -> None:
    dice = random.Random(1)
    for _ in range(200):
        first, begin = dice.randrange(10**6), dice.randrange(10**6)
        gap = Gap(1, first, first + dice.randrange(1, 2**31), begin, begin + dice.randrange(3000))
        cuts = sorted(dice.randrange(begin - 100, gap.until_minute + 100) for _ in range(5))
        edges = [begin - 100, *cuts, gap.until_minute + 101]
        parts = [gap.within(a, b) for a, b in pairwise(edges)]
        assert min(parts) >= 0
        assert sum(parts) == gap.end_seq - gap.first_seq


def test_reports_with_an_unsynchronized_clock_count_at_their_receipt_and_their_device_is_named(store_url: str) -> None:
    pi, sure = Pi("pi-1"), Pi("pi-2")
    behind_ms = NOW_MS - 2 * 60 * MINUTE_MS
    record(
        store_url,
        pi.info() + sure.info() + pi.window(behind_ms, [1.0], clock_synced=0) + sure.window(NOW_MS - 1, [1.0]),
        NOW_MS - 1000,
    )
    answers = {answer.group["device"]: answer for answer in ask(store_url, 0.25, ("device",))}
    assert {device: answer.latency.count for device, answer in answers.items()} == {"pi-1": 1, "pi-2": 1}
    assert answers["pi-1"].counters["requests"] == answers["pi-2"].counters["requests"]
    query = FleetQuery(store_url)
    assert query.unsynced(Question(NOW_MS - 60 * MINUTE_MS, NOW_MS), NOW_MS) == ["plant-a/pi-1"]
    assert query.unsynced(Question(NOW_MS - 60 * MINUTE_MS, NOW_MS, where={"device": "pi-2"}), NOW_MS) == []
    query.close()
