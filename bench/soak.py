"""A long mixed load: new versions, killed workers, and each hostile client in turn.

Three models on one daemon: `digits` (INT8 on ONNX Runtime; its worker must survive), `camera` (150 KB in, a new
version every few seconds) and `killed` (its worker is killed now and then). Clients of several kinds send requests to
all three in closed loops, while the attacks of `support/attacks.py` take turns on all three. At the end:

    requests      none failed, except with an error that allows a retry
    answers       each has the shape, and digits the values, of the answer before the load
    digits        the same worker serves from beginning to end
    memory        of the supervisor and of digits' worker (RssAnon): no more growth than `--growth-mb-max` from the
                  second to the last quarter of the time
    descriptors, threads   without clients, no more of them than before the first client

The exit status is 1 if one of these does not hold.

    python -m bench.soak --minutes 10
    python -m bench.soak --minutes 600 --json > soak.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.attacks import ATTACKS, Attacker
from bench.support.bundles import make_zeros_bundle
from bench.support.devices import deploy, digits_device, edgertd, serving
from bench.support.processes import own_mb
from bench.support.tables import emit
from edgert import Client
from edgert.bundle.signing import new_key
from edgert.errors import EdgeRTError
from tests.support.paths import DIGITS

SWAP_EVERY_S = 7.0
KILL_EVERY_S = 70.0  # this time is long enough for the daemon to forget the previous crash
ATTACK_S = 5.0
SAMPLE_EVERY_S = 2.0
SAY_EVERY_S = 30.0
QUIET_S_MAX = 20.0
SPARE = 2  # the number of descriptors and of threads that come and go, such as a command's connection and a timer
GROWTH_MB_MAX = 4.0
COLUMNS = ("check", "seen", "limit", "holds")

CAMERA = np.zeros((1, 224, 224, 3), np.uint8)
KILLED = np.zeros((1, 16), np.float32)


@dataclass
class Seen:
    """The results of one client."""

    answered: int = 0
    wrong: int = 0
    again: Counter[str] = field(default_factory=Counter)  # retryable errors by code
    failed: Counter[str] = field(default_factory=Counter)  # all other errors by message

    def add(self, other: Seen) -> None:
        self.answered += other.answered
        self.wrong += other.wrong
        self.again += other.again
        self.failed += other.failed


@dataclass(frozen=True)
class Sample:
    """The resources of a process."""

    at_s: float
    mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        process = Path(f"/proc/{pid}")
        held, threads = len(os.listdir(process / "fd")), len(os.listdir(process / "task"))
        return cls(time.monotonic(), own_mb(pid), held, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--growth-mb-max", type=float, default=GROWTH_MB_MAX)
    options = parser.parse_args()
    with digits_device() as (state, path):
        key = new_key()
        (state / "keys" / "soak.pem").write_bytes(key.public.pem())
        soak = Soak(state, path, lambda model, item, n: make_zeros_bundle(state.parent, key, model, item, release=n))
        rows = soak.run(options.minutes * 60, options.growth_mb_max)
    emit(rows, COLUMNS, options.json)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


class Soak:
    def __init__(self, state: Path, path: Path, bundle: Callable[[str, NDArray[Any], int], Path]) -> None:
        self._state, self._path, self._bundle = state, path, bundle
        self._release, self._kills, self._strikes = 1, 0, 0
        self._attacks = list(ATTACKS)
        self._attacker: Attacker | None = None

    def run(self, seconds: float, growth_mb_max: float) -> list[dict[str, Any]]:
        deploy(self._state, "camera", self._bundle("camera", CAMERA, 1))
        deploy(self._state, "killed", self._bundle("killed", KILLED, 1))
        pids = self._lasting()
        with Client(self._path) as first:  # the count below then includes what a first connection allocates
            first.models()
            first.metadata("digits")
        time.sleep(0.5)
        before = {name: Sample.of(pid) for name, pid in pids.items()}
        samples: dict[str, list[Sample]] = {name: [] for name in pids}
        clients = [AskingProcess(self._path, *kind) for kind in KINDS]
        self._disturb(seconds, samples, pids)
        seen = Seen()
        for client in clients:
            seen.add(client.end())
        return self._checks(seen, before, samples, pids, growth_mb_max)

    def _disturb(self, seconds: float, samples: dict[str, list[Sample]], pids: dict[str, int]) -> None:
        """Install versions, kill the worker, change the attack and take samples, each at its own interval."""
        began = time.monotonic()
        jobs: list[tuple[float, Callable[[], None]]] = [
            (SWAP_EVERY_S, self._swap),
            (KILL_EVERY_S, self._kill),
            (ATTACK_S, self._next_attack),
            (SAMPLE_EVERY_S, lambda: _look(samples, pids)),
            (SAY_EVERY_S, lambda: self._say(time.monotonic() - began, samples)),
        ]
        due = [began + every for every, _ in jobs]
        while time.monotonic() < began + seconds:
            for number, (every, job) in enumerate(jobs):
                if time.monotonic() >= due[number]:
                    job()
                    due[number] = max(due[number] + every, time.monotonic())
            time.sleep(0.05)
        self._end_attack()

    def _swap(self) -> None:
        self._release += 1
        bundle = self._bundle("camera", CAMERA, self._release)
        deploy(self._state, "camera", bundle)
        bundle.unlink()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, TypeError):  # the worker is starting
            os.kill(serving(self._state, "killed")["pid"], signal.SIGKILL)
            self._kills += 1

    def _next_attack(self) -> None:
        self._end_attack()
        name = self._attacks.pop(0)
        self._attacks.append(name)
        model = ("digits", "camera", "killed")[self._release % 3]
        self._attacker = Attacker(name, self._path, model)
        self._attacker.begin()

    def _end_attack(self) -> None:
        if self._attacker is not None:
            self._strikes += self._attacker.end()
            self._attacker.close()
            self._attacker = None

    def _say(self, now_s: float, samples: dict[str, list[Sample]]) -> None:
        held = ", ".join(
            f"{name} {last[-1].mb:.1f} MB {last[-1].descriptors} fds" for name, last in samples.items() if last
        )
        print(f"{now_s:.0f} s: release {self._release}, {self._kills} kills, {held}", file=sys.stderr)

    def _lasting(self) -> dict[str, int]:
        """Return the processes that must survive."""
        daemon = edgertd(self._state, "status")["daemon"]["pid"]
        return {"supervisor": daemon, "digits": serving(self._state, "digits")["pid"]}

    def _checks(
        self,
        seen: Seen,
        before: dict[str, Sample],
        samples: dict[str, list[Sample]],
        pids: dict[str, int],
        growth_mb_max: float,
    ) -> list[dict[str, Any]]:
        figures = {
            "answered": seen.answered,
            "again": dict(seen.again),
            "swaps": self._release - 1,
            "kills": self._kills,
            "strikes": self._strikes,
        }
        rows = [
            _row("requests that failed for good", sum(seen.failed.values()), 0, kinds=dict(seen.failed), **figures),
            _row("requests to be sent again", sum(seen.again.values()), None, kinds=dict(seen.again)),
            _row("requests answered", seen.answered, None),
            _row("wrong answers", seen.wrong, 0),
            _row("versions swapped", self._release - 1, None),
            _row("workers killed", self._kills, None),
            _row("hostile strikes", self._strikes, None),
        ]
        if self._lasting() != pids:
            return [*rows, _row("processes that ended", 1, 0)]
        rows.append(_row("processes that ended", 0, 0))
        after = self._when_quiet(before, pids)
        for name, seen_samples in samples.items():
            quarter = len(seen_samples) // 4
            second, last = seen_samples[quarter : 2 * quarter], seen_samples[-quarter:]
            grew = statistics.median(s.mb for s in last) - statistics.median(s.mb for s in second) if quarter else 0.0
            hours = (last[0].at_s - second[0].at_s) / 3600 if quarter else 1.0
            mb = {"mb": round(after[name].mb, 1), "mb_per_hour": round(grew / hours, 1)}
            rows.append(_row(f"{name}: memory grew, MB", round(grew, 2), growth_mb_max, **mb))
            for what in ("descriptors", "threads"):
                left = getattr(after[name], what) - getattr(before[name], what)
                rows.append(_row(f"{name}: {what} left", left, SPARE))
        return rows

    def _when_quiet(self, before: dict[str, Sample], pids: dict[str, int]) -> dict[str, Sample]:
        """Return the resources of the processes after the last clients are gone."""
        until = time.monotonic() + QUIET_S_MAX
        while True:
            after = {name: Sample.of(pid) for name, pid in pids.items()}
            back = all(
                after[n].descriptors <= before[n].descriptors and after[n].threads <= before[n].threads for n in pids
            )
            if back or time.monotonic() > until:
                return after
            time.sleep(0.5)


# --- the clients ------------------------------------------------------------------------------

# Each entry is (model, transport, items per request, cache, priority).
KINDS: tuple[tuple[str, str, int, bool, Any], ...] = (
    ("digits", "auto", 1, False, "normal"),
    ("digits", "socket", 16, True, "high"),
    ("camera", "auto", 1, False, "normal"),
    ("camera", "socket", 1, True, "normal"),
    ("killed", "auto", 1, False, "normal"),
)
PAUSE_S = 0.002  # a client without pauses would starve the others on two cores
REFUSED_PAUSE_S = 0.05


class AskingProcess:
    """A client process of one kind, which sends requests until `end` returns its results."""

    def __init__(self, path: Path, *kind: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_ask, args=(theirs, path, *kind), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> Seen:
        self._pipe.send(False)
        seen: Seen = self._pipe.recv()
        self._process.join(10)
        return seen


def _ask(pipe: Connection, path: Path, model: str, transport: str, items: int, cache: bool, priority: Any) -> None:
    image = np.load(DIGITS / "holdout.npz")["image"]
    item = {"digits": image[:items], "camera": CAMERA, "killed": KILLED}[model]
    item = np.ascontiguousarray(item)
    seen, client = Seen(), Client(path, transport=transport)
    right = client.infer(model, item, cache=False)
    while not pipe.poll():
        try:
            answer = client.infer(model, item, cache=cache, priority=priority, timeout_s=10.0)
            seen.answered += 1
            seen.wrong += not all(np.allclose(answer[name], right[name], atol=1e-5) for name in right)
            time.sleep(PAUSE_S)
        except EdgeRTError as error:
            counter = seen.again if error.retryable else seen.failed
            counter[error.code if error.retryable else f"{error.code}: {error.message}"] += 1
            time.sleep(REFUSED_PAUSE_S)
        except Exception as error:
            seen.failed[f"{type(error).__name__}: {error}"] += 1
    client.close()
    pipe.send(seen)


def _look(samples: dict[str, list[Sample]], pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        with contextlib.suppress(OSError):  # the process ended, which the final check reports
            samples[name].append(Sample.of(pid))


def _row(check: str, seen: float, limit: float | None, **more: Any) -> dict[str, Any]:
    return {"check": check, "seen": seen, "limit": limit, "holds": limit is None or seen <= limit, **more}


if __name__ == "__main__":
    main()
