"""`edgert fleet query`: true percentiles out of the store."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import click

from edgert.errors import ConfigInvalid
from edgert_deploy.cli.fleet_options import columns
from edgert_deploy.cli.store_options import store_option
from edgert_deploy.fleet.store.query import DIMENSIONS, Answer, FleetQuery, Question

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
PERCENTILES_MAX = 20

EPILOG = f"""\b
Examples:
  edgert fleet query --model digits
  edgert fleet query --model digits --window 1h --by version,profile --percentiles 50,95,99
  edgert fleet query --window 7d --by device --site plant-a --store postgresql://ops@db/fleet
  edgert fleet query --model digits --window 24h --step 1h --by version --json

\b
--by takes any of {", ".join(DIMENSIONS)}. Percentiles are those of all requests of a group pooled (error at most
1.09 %), never means of percentiles. A window belongs to the minute in which it ended; what lies more than two days
back is cut at whole hours. Errors, shed and cache hits are what the counters grew by.

\b
Exit codes: 0 done (also where nothing was reported), 4 a word cannot be used, 6 the store cannot be reached.
"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 110})
@store_option
@click.option("--window", default="1h", show_default=True, metavar="TIME", help="How far back: 30m, 24h, 7d.")
@click.option("--until", metavar="TIME", default="0s", help="How long ago the window ended (default: now).")
@click.option("--step", metavar="TIME", help="Cut the window into steps of this length.")
@click.option("--by", default="model,version", show_default=True, metavar="WORDS", help="What to group by; '' for all.")
@click.option("--percentiles", default="50,95,99", show_default=True, metavar="NUMBERS", help="Which percentiles.")
@click.option("--model", metavar="MODEL", help="Only this model.")
@click.option("--version", "version_", metavar="VERSION", help="Only this version, such as r7.")
@click.option("--site", metavar="SITE", help="Only this site.")
@click.option("--device", metavar="DEVICE", help="Only this device.")
@click.option("--profile", metavar="PROFILE", help="Only devices of this profile.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def query(
    store_url: str,
    window: str,
    until: str,
    step: str | None,
    by: str,
    percentiles: str,
    version_: str | None,
    as_json: bool,
    **only: str | None,
) -> None:
    """Percentiles, rates and errors over any stretch of time, merged exactly from the store."""
    now_ms = time.time_ns() // 1_000_000
    until_ms = now_ms - seconds("--until", until) * 1000
    step_s = seconds("--step", step) if step else 0
    if step_s % 60:
        raise ConfigInvalid(f"--step {step}: steps are whole minutes")
    shares = shares_of(percentiles)
    question = Question(
        since_ms=until_ms - seconds("--window", window) * 1000,
        until_ms=until_ms,
        by=tuple(dict.fromkeys(word.strip() for word in by.split(",") if word.strip())),
        where={name: value for name, value in {**only, "version": version_}.items() if value},
        step_min=step_s // 60,
    )
    fleet = FleetQuery(store_url)
    try:
        answers = fleet.answer(question, now_ms)
    finally:
        fleet.close()
    rows = [_row(answer, shares, bool(step)) for answer in answers]
    if as_json:
        said = {"since_ms": question.since_ms, "until_ms": until_ms, "by": question.by, "groups": rows}
        click.echo(json.dumps(said))
    elif rows:
        click.echo(columns([list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]))
    else:
        click.echo(f"no report in the last {window} that fits; `edgert fleet record` fills the store", err=True)


def seconds(option: str, text: str) -> int:
    """`90s`, `30m`, `24h`, `7d` or `2w`. Raises ConfigInvalid."""
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text.strip())
    if not match:
        raise ConfigInvalid(f"{option} {text!r} is no length of time; write 30m, 24h or 7d")
    return int(match[1]) * _UNIT_S[match[2]]


def shares_of(percentiles: str) -> list[tuple[str, float]]:
    """The name and share of each percentile: `99.9` is ("p99.9_ms", 0.999). Raises ConfigInvalid."""
    words = [word.strip() for word in percentiles.split(",") if word.strip()]
    if not 0 < len(words) <= PERCENTILES_MAX:
        raise ConfigInvalid(f"--percentiles {percentiles!r}: give 1 to {PERCENTILES_MAX} numbers, such as 50,95,99.9")
    try:
        shares = [(f"p{word}_ms", float(word) / 100) for word in words]
    except ValueError as error:
        raise ConfigInvalid(f"--percentiles {percentiles!r} is not numbers with commas, such as 50,95,99.9") from error
    if any(not 0 <= share <= 1 for _, share in shares):
        raise ConfigInvalid(f"--percentiles {percentiles!r}: a percentile lies between 0 and 100")
    return shares


def _row(answer: Answer, shares: list[tuple[str, float]], stepped: bool) -> dict[str, Any]:
    latency = answer.latency
    begin = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(answer.start_ms / 1000))
    return {
        **({"begin": begin} if stepped else {}),
        **answer.group,
        "windows": answer.windows,
        "answered": latency.count,
        "rate_per_s": round(latency.count / answer.duration_s, 3),
        **{name: round(latency.quantile(share), 4) if latency.count else None for name, share in shares},
        "max_ms": round(latency.max, 4) if latency.count else None,
        **{name: answer.counters[name] for name in ("errors", "shed", "cache_hits")},
    }


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
