"""Results of the store as JSON and as CSV, for `edgert fleet query` and the page's API."""

from __future__ import annotations

import csv
import io
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import Sketch
from edgert.telemetry.spans import STAGES
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question, period_ms

PERCENTILES_DEFAULT = "50,95,99"
PERCENTILES_MAX = 20
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?", re.ASCII)
_FORMULA = re.compile(r"[=+\-@\t\r](?![0-9:,.]*\Z)")

Shares = Sequence[tuple[str, Fraction]]


@dataclass(frozen=True)
class QueryRequest:
    """A question, and the form of its answer.

    Attributes:
        question: The question; if it is about stages, the answer has a row for each stage.
        shares: The percentiles of each row.
        buckets: Whether each row has its histogram.
    """

    question: Question
    shares: Shares
    buckets: bool = False

    def run(self, fleet: FleetQuery, now_ms: int) -> dict[str, Any]:
        """Return the answer as JSON values, with the period that it covers. Raises StoreFailed."""
        question = self.question
        since_ms, until_ms = period_ms(question, now_ms)
        answers = fleet.answer(question, now_ms)
        return {
            "since_ms": since_ms,
            "until_ms": until_ms,
            "by": list(question.by),
            "newest_ms": fleet.newest_ms(),
            "missing_devices": _missing_of(answers),
            "clocks_not_synchronized": fleet.unsynced(question, now_ms),
            "windows": sum(answer.windows for answer in answers),
            "groups": [row for answer in answers for row in self._rows(answer)],
        }

    def _rows(self, answer: Answer) -> Iterator[dict[str, Any]]:
        stepped = bool(self.question.step_min)
        if self.question.stages:
            rows = list(stage_rows(answer, self.shares, stepped=stepped))
        else:
            rows = [(answer_row(answer, self.shares, stepped=stepped), answer.latency)]
        for row, sketch in rows:
            yield {**row, **(_histogram(sketch) if self.buckets else {})}


def shares_of(percentiles: str) -> list[tuple[str, Fraction]]:
    """Return each percentile's name and share: `99.9` is ("p99.9_ms", 999/1000). Raises ConfigInvalid."""
    words = [word.strip() for word in percentiles.split(",") if word.strip()]
    if not 0 < len(words) <= PERCENTILES_MAX:
        raise ConfigInvalid(f"percentiles {percentiles!r}: give 1 to {PERCENTILES_MAX} numbers, such as 50,95,99.9")
    if not all(_DECIMAL.fullmatch(word) for word in words):
        raise ConfigInvalid(f"percentiles {percentiles!r} is not a list of numbers, such as 50,95,99.9")
    shares = [(f"p{word}_ms", Fraction(word) / 100) for word in words]
    if any(share > 1 for _, share in shares):
        raise ConfigInvalid(f"percentiles {percentiles!r}: percentiles are between 0 and 100")
    return shares


DEFAULT_SHARES = shares_of(PERCENTILES_DEFAULT)


def answer_row(answer: Answer, shares: Shares, *, stepped: bool = False) -> dict[str, Any]:
    """Return one group as a flat row. If `stepped`, the row begins with the time of its step."""
    latency = answer.latency
    return {
        **_name(answer, stepped),
        "windows": answer.windows,
        "missing": sum(answer.missing.values()),
        "answered": latency.count,
        "rate_per_s": round(latency.count / answer.duration_s, 3),
        **_percentiles(latency, shares),
        **{name: answer.counters[name] for name in ("errors", "shed", "cache_hits")},
    }


def stage_rows(answer: Answer, shares: Shares, *, stepped: bool = False) -> Iterator[tuple[dict[str, Any], Sketch]]:
    """Yield a row and a sketch for each stage with times. `share` is the stage's share of the total time."""
    sketches = answer.stages.sketches() if answer.stages else {}
    total_ms = sum(sketch.sum for sketch in sketches.values())
    for stage in STAGES:
        if sketch := sketches.get(stage):
            share = {"share": round(sketch.sum / total_ms, 4) if total_ms else 0.0}
            row = {**_name(answer, stepped), "stage": stage, "answered": sketch.count, **share}
            yield {**row, **_percentiles(sketch, shares)}, sketch


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a heading. Rows may have different fields; a missing field is empty.

    A spreadsheet runs text that begins like a formula, and devices can send such text. So this function puts an
    apostrophe in front of such text.
    """
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, names))
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def time_text(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(at_ms / 1000))


def _name(answer: Answer, stepped: bool) -> dict[str, Any]:
    return {**({"begin": time_text(answer.start_ms)} if stepped else {}), **answer.group}


def _percentiles(sketch: Sketch, shares: Shares) -> dict[str, float | None]:
    values = {name: round(sketch.quantile(share), 4) if sketch.count else None for name, share in shares}
    return {**values, "max_ms": round(sketch.max, 4) if sketch.count else None}


def _histogram(latency: Sketch) -> dict[str, Any]:
    """Return the fields of a histogram in the form of the telemetry contract, so that it can be merged."""
    return {
        "zero": latency.zero,
        "sum_ms": round(latency.sum, 6),
        "min_ms": round(latency.min, 6) if latency.count else None,
        "buckets": latency.encode(),
    }


def _missing_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the number of missing reports of each device, the largest first."""
    total: Counter[str] = Counter()
    for answer in answers:
        total.update(answer.missing)
    return dict(total.most_common())


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value
