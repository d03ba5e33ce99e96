"""The cost of hostile clients for a good client: its p99 during each attack, divided by its p99 without attacks.

The good client sends requests to digits (INT8 on ONNX Runtime), the cache off. Each attack (`support/attacks.py`) runs
in its own process at a low priority, on the same model. `strikes_per_s` shows how much an attack achieved on a loaded
machine, and `us_a_strike` is the daemon's processor time per strike without other load. Quiet rounds and attacks
alternate; each figure is the median over the rounds. `times_p99` is the median of the ratios of neighbouring rounds.
`grew_mb` is the growth of the daemon's memory (RssAnon) from before the first round until after the last round, and
`descriptors_left` is the growth of its number of open descriptors. A failed request of the good client ends the
benchmark with exit status 1.

    python -m bench.hostile            # a table
    python -m bench.hostile --json     # JSON lines
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.attacks import ATTACKS, Attacker
from bench.support.clients import Ask, Clients, Load
from bench.support.devices import digits_device, edgertd
from bench.support.processes import cpu_us, own_mb
from bench.support.tables import emit
from edgert import Client
from tests.support.paths import DIGITS

SETTLE_S = 0.3
TIMES_P99_MAX = 2.0  # the target
COLUMNS = (
    "attack",
    "strikes_per_s",
    "us_a_strike",
    "quiet_p50_us",
    "p50_us",
    "quiet_p99_us",
    "p99_us",
    "times_p99",
    "met",
    "grew_mb",
    "descriptors_left",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one round")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    options = parser.parse_args()
    rows = []
    with digits_device() as (state, path):
        good = Clients(1, lambda _: asking(path))
        for attack in options.attacks:
            print(attack, file=sys.stderr)
            try:
                rows.append(measure(attack, state, path, good, options.rounds, options.seconds))
            except EOFError:
                sys.exit(f"{attack}: a request of the good client failed")
        good.close()
    emit(rows, COLUMNS, options.json)


def measure(attack: str, state: Path, path: Path, good: Clients, rounds: int, seconds: float) -> dict[str, Any]:
    attacker = Attacker(attack, path, "digits")
    before = held(state)
    quiet: list[Load] = []
    under: list[Load] = []
    us_a_strike = cost_us(attacker, state, seconds)
    strikes = 0
    for _ in range(rounds):
        quiet.append(good.round(seconds))
        attacker.begin()
        time.sleep(SETTLE_S)
        under.append(good.round(seconds))
        strikes += attacker.end()
        time.sleep(SETTLE_S)
    attacker.close()
    time.sleep(1.0)
    after = held(state)
    times_p99 = statistics.median(u.p99_us / q.p99_us for u, q in zip(under, quiet, strict=True))
    return {
        "attack": attack,
        "strikes_per_s": round(strikes / rounds / (seconds + SETTLE_S)),
        "us_a_strike": round(us_a_strike),
        "quiet_p50_us": round(statistics.median(load.p50_us for load in quiet)),
        "p50_us": round(statistics.median(load.p50_us for load in under)),
        "quiet_p99_us": round(statistics.median(load.p99_us for load in quiet)),
        "p99_us": round(statistics.median(load.p99_us for load in under)),
        "times_p99": f"{times_p99:.2f}",
        "met": times_p99 <= TIMES_P99_MAX,
        "grew_mb": round(after[0] - before[0], 1),
        "descriptors_left": after[1] - before[1],
    }


def cost_us(attacker: Attacker, state: Path, seconds: float) -> float:
    """Return the daemon's processor time per strike."""
    pids = daemon(state)
    before_us = cpu_us(pids)
    attacker.begin()
    time.sleep(seconds)
    strikes = attacker.end()
    time.sleep(SETTLE_S)
    return (cpu_us(pids) - before_us) / max(1, strikes)


def asking(path: Path) -> Ask:
    """Send one request of the good client. If it fails, end the benchmark."""
    image = np.ascontiguousarray(np.load(DIGITS / "holdout.npz")["image"][:1])
    client = Client(path)
    return lambda: client.infer("digits", image, cache=False)


def held(state: Path) -> tuple[float, int]:
    """Return the memory (RssAnon) in MB and the number of descriptors of the supervisor and the workers."""
    pids = daemon(state)
    with contextlib.suppress(OSError):
        return sum(own_mb(pid) for pid in pids), sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    sys.exit("a process of the daemon ended during the benchmark")


def daemon(state: Path) -> list[int]:
    """Return the processes of the supervisor and the workers."""
    status = edgertd(state, "status")
    return [status["daemon"]["pid"], *(model["serving"]["pid"] for model in status["models"])]


if __name__ == "__main__":
    main()
