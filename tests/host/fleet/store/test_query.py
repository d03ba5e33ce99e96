"""The answer for any grouping and period is exact, and the same with SQLite and a real PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import Sketch, merged
from edgert_deploy.fleet.store import query
from edgert_deploy.fleet.store.query import Question
from tests.support.fleet import NOW_MS, Pi, a_fleet, ask, record, replayed


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def test_every_grouping_over_every_period_gives_the_sketch_of_all_its_requests(url: str) -> None:
    fleet = a_fleet()
    sent = replayed(fleet)
    recorder = record(url, sent[: len(sent) // 2])
    again = record(url, sent[len(sent) // 3 :])  # another recorder, which receives a part of the reports again
    assert recorder.refused + again.refused == 0
    assert recorder.recorded + again.recorded == 6 * 200 * 2
    for hours in (0.05, 0.5, 1, 2.5, 3.25):  # periods within an hour, over its end, and over whole hours
        for by in ((), ("version",), ("version", "profile"), ("device",), ("device", "version")):
            groups = {tuple(answer.group.values()): answer for answer in ask(url, hours, by, model="digits")}
            expected: dict[tuple[str, ...], list[Sketch]] = {}
            for pi in fleet:
                names = {"version": pi.version, "profile": pi.profile, "device": pi.topics.device}
                for ts_ms, sketch in pi.sketches:
                    if ts_ms >= NOW_MS - hours * 3_600_000:
                        expected.setdefault(tuple(names[word] for word in by), []).append(sketch)
            assert groups.keys() == expected.keys()
            for key, answer in groups.items():
                assert answer.latency == merged(expected[key]), (hours, by, key)
                assert answer.windows == len(expected[key])
    steps = ask(url, 3, ("version",), step_min=60)
    assert len(steps) == 2 * 3
    assert merged(step.latency for step in steps) == ask(url, 3)[0].latency
    assert merged(step.latency for step in ask(url, 3, step_min=7)) == ask(url, 3)[0].latency
    (one,) = ask(url, 3, ("site",), device="pi-2")
    assert one.latency == merged(sketch for ts, sketch in fleet[2].sketches if ts >= NOW_MS - 3 * 3_600_000)


def test_an_invalid_question_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        replace(Question(0, 1), where={"colour": "red"})


def test_an_answer_with_too_many_groups_is_refused_before_it_takes_memory(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(url, [message for n in range(4) for message in Pi(f"pi-{n}").window(NOW_MS - 1, [1.0])])
    monkeypatch.setattr(query, "GROUPS_MAX", 3)
    assert len(ask(url, 1, ("model",))) == 1
    with pytest.raises(ConfigInvalid, match="more than 3 groups"):
        ask(url, 1, ("device",))
