"""For any period and grouping, the stage times equal the stage times computed from all raw requests."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray

from edgert.errors import ConfigInvalid
from edgert.telemetry import messages
from edgert.telemetry.sketch import RELATIVE_ERROR_MAX
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import STAGES, RequestSpan
from edgert.tensors import StageTimes
from edgert_deploy.fleet.store import database, query, schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from tests.support.fleet import NOW_MS, Pi, Sent, ask, record

HOURS = 3.25  # hours; the period has whole hours and parts of hours
Times = NDArray[np.int64]  # [requests, stages] in us


def a_fleet(dice: np.random.Generator) -> tuple[Sent, list[tuple[Pi, int, Times]]]:
    """Devices with three versions and two profiles, each with its own span counter and a window every seven minutes."""
    sent, raw = Sent(), list[tuple[Pi, int, Times]]()
    for number in range(4):
        pi = Pi(f"pi-{number}", version=f"r{number % 3}", profile=f"board-{number % 2}")
        spans = SpanCounter("digits", lambda: 0.0)
        sent += pi.info()
        for seq, minute in enumerate(range(1, int(HOURS * HOUR_MIN), 7), start=1):
            times = np.rint(dice.lognormal(np.arange(len(STAGES)) + number, 1, (23, len(STAGES)))).astype(np.int64)
            hits = dice.random(len(times)) < 0.3
            times[hits, STAGES.index("queue") : STAGES.index("engine") + 1] = 0
            for row, hit in zip(times.tolist(), hits, strict=True):
                span = RequestSpan("ok", sum(row), StageTimes(*row[:-1]), row[-1], 0 if hit else 1, bool(hit))
                spans.record(span)
            ts_ms = NOW_MS - minute * MINUTE_MS
            report = messages.hist_fields(spans.end_window(now=60.0), model_version=pi.version)
            fields = messages.envelope(ts_ms=ts_ms, boot="b1", seq=seq) | report | {"window_s": 60.0}
            sent.append((pi.topics.hist("digits"), messages.dump(fields)))
            raw.append((pi, ts_ms, np.where(hits[:, None] & np.isin(STAGES, ("queue", "engine")), -1, times)))
    return sent, raw


def test_every_grouping_over_every_period_has_the_percentiles_of_the_raw_times(store_url: str) -> None:
    sent, raw = a_fleet(np.random.default_rng(7))
    first = record(store_url, sent[: len(sent) // 2])
    second = record(store_url, sent[len(sent) // 3 :])  # another recorder, which receives a part of the reports again
    assert first.refused + second.refused == 0
    for hours in (0.5, 1, HOURS):
        for by in ((), ("version", "profile"), ("device",)):
            for answer in ask(store_url, hours, by, stages=True, model="digits"):
                mine = [
                    times
                    for pi, ts_ms, times in raw
                    if ts_ms >= NOW_MS - hours * 3_600_000
                    and {"version": pi.version, "profile": pi.profile, "device": pi.topics.device}.items()
                    >= answer.group.items()
                ]
                assert answer.stages is not None
                found, expected = answer.stages.sketches(), np.concatenate(mine)
                assert tuple(found) == STAGES
                for number, name in enumerate(STAGES):
                    ms = expected[expected[:, number] >= 0, number] / 1000
                    assert found[name].count == len(ms), (hours, by, name)
                    assert found[name].sum == pytest.approx(ms.sum(), rel=RELATIVE_ERROR_MAX)
                    for share in (0.501, 0.949, 0.991):  # not a whole number for any number of requests here
                        wanted = np.percentile(ms, 100 * share, method="inverted_cdf")
                        assert found[name].quantile(share) == pytest.approx(wanted, rel=RELATIVE_ERROR_MAX)
    steps = ask(store_url, 3, step_min=20, stages=True)
    counts = [step.stages.sketches()["encode"].count for step in steps if step.stages]
    assert sum(counts) == 23 * sum(ts_ms >= NOW_MS - 3 * 3_600_000 for _, ts_ms, _ in raw)
    assert ask(store_url, 3)[0].stages is None, "nobody asked"


def test_an_answer_with_too_many_groups_is_refused_before_it_takes_memory(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(store_url, [message for n in range(4) for message in Pi(f"pi-{n}").window(NOW_MS - 1, [1.0], engine=[1.0])])
    monkeypatch.setattr(query, "STAGE_GROUPS_MAX", 3)
    assert len(ask(store_url, 1, ("device",))) == 4
    with pytest.raises(ConfigInvalid, match="more than 3 groups"):
        ask(store_url, 1, ("device",), stages=True)


def test_reports_of_older_devices_have_no_rows_for_stages(store_url: str) -> None:
    record(store_url, Pi("old").window(NOW_MS - 1, [1.0]))
    (answer,) = ask(store_url, 1, stages=True)
    assert (answer.latency.count, answer.stages) == (1, None)
    engine = database.open_engine(store_url, writes=False)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(schema.hist_window.c.stages)) == b""
        for table in schema.STAGES.values():
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0
    engine.dispose()
