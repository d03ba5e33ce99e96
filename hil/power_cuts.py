"""Power cuts: an emulated machine is killed at random instants of what changes its slots, and started again.

    make hil-power CUTS=200 SEED=7                     # an emulated machine
    python -m hil.power_cuts --on local --cuts 1000    # this machine's kernel: fast

The state lies in an ext4 on a disk that forgets (`disk.py`). A cut loses what was in the page cache only, and of what the
disk had taken and not been told to flush, each sector or not, by chance: harder than any one disk. Afterwards the disk
is mounted as it is, the daemon starts, and an app's question must be answered by the old version or the new one, bit
for bit; what was acknowledged before the cut must have lasted. Nobody helps.

Half of the cuts come at a random write or flush of the operation, half at a random instant of its time and a little beyond.

The emulated machine has a kernel of its own and is killed. So that many cuts fit into an hour, it does not boot after
each: it goes on from one saved just after a boot, when its disk for the state was not mounted yet; the boot's identity is
another each time. `--cold N` boots N times for real. Without an emulator (`--on local`) the disk stops, every process on it
is killed, and it is mounted anew: the same loss, many times faster, on the kernel of this machine.

Each cut is noted as it is judged, and the disk of one that failed kept beside the log: a run that ends early has its
figures, and `--resume LOG` goes on with it. Each cut has
chances of its own, from the seed and its number, so those that follow are what they would have been; the device is new.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid, DeviceError, EdgeRTError
from hil import rootfs
from hil.victims import VICTIMS, Agent, Victim

SERVES_S_MAX = 10.0  # from the daemon's start to an answer, as promised
BEYOND = 1.5  # times the operation's own time: what the page cache holds is written later
PROGRESS_CUTS = 10
OPERATIONS = ("install", "activate", "mark-good", "rollback", "collect")

Say = Callable[[str], None]


@dataclass
class Cut:
    """One cut and what came of it. `allowed` are the releases that may serve afterwards, `staged` one that must lie there.

    `ended` where the operation was acknowledged before the cut: then it must have lasted.
    """

    number: int
    operation: str
    at: str
    ended: bool
    lost_sectors: int
    allowed: tuple[int, ...]
    staged: int | None = None
    serves: int | None = None
    serves_after_s: float = 0.0
    problem: str = ""


@dataclass
class Rig:
    """What is cut, and how long each operation takes there, learned from those that were not cut."""

    victim: Victim
    seed: int
    chance: random.Random = field(default_factory=random.Random)
    seconds: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)

    def begin(self, *, cold: bool = False) -> tuple[Agent, dict[str, Any]]:
        """Power on, and wait until the daemon answers."""
        boot = uuid.UUID(int=self.chance.getrandbits(128)).hex
        agent = self.victim.on(boot, cold=cold)
        return agent, agent.ask("begin", boot=boot)

    def calmly(self, agent: Agent, operation: str, release: int = 0) -> None:
        """An operation that nobody disturbs: what it takes is noted."""
        bundle = agent.must("make", release=release)["bundle"] if operation == "install" else ""
        before = self.victim.disk.requests
        self.seconds[operation] = agent.must("operate", operation=operation, bundle=bundle)["s"]
        self.requests[operation] = max(1, self.victim.disk.requests - before)
        agent.must("follow")

    def cut(self, agent: Agent, number: int) -> Cut:
        """Prepare an operation, start it, and cut the power in it."""
        now = agent.must("slots")
        back = now["spare"] or [0, False]  # release, and whether it was marked good
        operation = self.chance.choice([o for o in OPERATIONS if o != "rollback" or back[1]])
        active, new = int(now["live"]), max(now["ratchet"], now["live"]) + 1
        if operation in ("activate", "mark-good", "collect"):
            self.calmly(agent, "install", new)
        if operation in ("mark-good", "collect"):
            self.calmly(agent, "activate")
        if operation == "collect":  # a version that failed its trial is what there is to clear away
            self.calmly(agent, "rollback")
        # What an activation began ends with the boot: only these two change what serves then.
        after = {"mark-good": new, "rollback": int(back[0])}.get(operation, active)
        at, ended = self._struck(agent, operation, new)
        self.victim.off()
        agent.close()
        lost = self.victim.disk.cut(self.chance)
        allowed = (after,) if ended else tuple(dict.fromkeys((active, after)))
        return Cut(number, operation, at, ended, lost, allowed, new if operation == "install" and ended else None)

    def _struck(self, agent: Agent, operation: str, new: int) -> tuple[str, bool]:
        """Start it, wait for the instant to cut: which it is, and whether the operation was acknowledged before."""
        words = {"operation": operation, "bundle": ""}
        if operation == "install":
            words["bundle"] = agent.must("make", release=new)["bundle"]
        took = self.seconds.get(operation, 0.2)
        if self.chance.random() < 0.5:
            nth = self.chance.randrange(self.requests.get(operation, 8) + 2)
            self.victim.disk.strike_at = self.victim.disk.requests + nth
            agent.send("operate", **words)
            return f"request {nth}", self._ended(agent, took * 4 + 2.0)
        wait_s = self.chance.uniform(0.0, took * BEYOND)
        agent.send("operate", **words)
        time.sleep(wait_s)
        return f"{wait_s * 1e3:.0f} ms", self._ended(agent, 0.0)

    def _ended(self, agent: Agent, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while not self.victim.disk.struck.is_set():
            answer = agent.answer(0.02 if within_s else 0.0)
            if answer is not None:  # what is acknowledged without power does not count
                return "error" not in answer and not self.victim.disk.struck.is_set()
            if time.monotonic() >= until:
                return False
        return False


def judged(cut: Cut, found: dict[str, Any]) -> Cut:
    """`cut` with what the machine said after it came up again."""
    if "error" in found:
        cut.problem = str(found["error"])
        return cut
    cut.serves, cut.serves_after_s = int(found["release"]), float(found["serves_after_s"])
    if cut.serves not in cut.allowed:
        cut.problem = f"release {cut.serves} serves, not one of {cut.allowed}"
    elif not found["exact"]:
        cut.problem = "its answer is not bit-exact"
    elif found["state"] not in ("steady", "staged") or found["live"] != cut.serves:
        cut.problem = f"the slots say {found}"
    elif cut.staged is not None and (found["spare"] or [None])[0] != cut.staged:
        cut.problem = f"release {cut.staged} was installed, and is gone: {found}"
    return cut


def cuts(rig: Rig, numbers: range, cold: int, say: Say) -> Iterator[tuple[Cut, bytes]]:
    """Cut for each of `numbers`, the first `cold` followed by a real boot; stops where the machine does not come back.

    Each with what lay on the disk after it.
    """
    rig.chance = random.Random(f"{rig.seed} {numbers.start - 1}")
    agent, found = rig.begin()
    if "error" in found:
        raise DeviceError(f"it does not serve before any cut: {found['error']}")
    say(f"it serves: {found}")
    new = int(agent.must("slots")["ratchet"]) + 1
    for operation in ("install", "activate", "mark-good"):
        rig.calmly(agent, operation, new)
    for n in numbers:
        rig.chance = random.Random(f"{rig.seed} {n}")
        cut = rig.cut(agent, n)
        left = rig.victim.disk.content
        agent, found = rig.begin(cold=n <= cold)
        yield judged(cut, found), left
        if "error" in found:
            return


def summary(done: list[Cut], seed: int) -> str:
    """Markdown: a row for each operation, and one line on the times."""
    lines = [
        "| operation | cuts | acknowledged before | sectors were lost | failed |",
        "|---|---|---|---|---|",
    ]
    for operation in OPERATIONS:
        rows = [cut for cut in done if cut.operation == operation]
        ended, lost = sum(cut.ended for cut in rows), sum(cut.lost_sectors > 0 for cut in rows)
        lines.append(f"| {operation} | {len(rows)} | {ended} | {lost} | {sum(bool(cut.problem) for cut in rows)} |")
    times = sorted(cut.serves_after_s for cut in done if not cut.problem) or [0.0]
    late = sum(time_s > SERVES_S_MAX for time_s in times)
    lines.append(
        f"\n{len(done)} cuts, seed {seed}: {sum(bool(cut.problem) for cut in done)} failed; an answer "
        f"{times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (longest) after the daemon's start, {late} later than "
        f"{SERVES_S_MAX:.0f} s"
    )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=sorted(VICTIMS), default="machine", help="what is cut [machine]")
    parser.add_argument("--cuts", type=int, default=200, help="how many [200]")
    parser.add_argument("--cold", type=int, default=0, help="after how many of them the machine boots for real [0]")
    parser.add_argument("--seed", type=int, default=None, help="of the random numbers [another each time]")
    parser.add_argument(
        "--without-fsync",
        action="store_true",
        help="take fsync away (local): shows that the rig notices what it is for",
    )
    parser.add_argument(
        "--log", type=Path, help="a file that gets one JSON line a cut [named by the seed, in the cache]"
    )
    parser.add_argument("--resume", type=Path, metavar="LOG", help="go on with the run that wrote this file")
    asked = parser.parse_args()
    if asked.resume is not None and (asked.seed is not None or asked.log is not None):
        parser.error("--resume takes the seed from its file, and writes on in it")
    return asked


@dataclass(frozen=True)
class Log:
    """What a run has found so far, on disk: what it is, then a JSON line a cut."""

    path: Path
    on: str
    seed: int

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"on": self.on, "seed": self.seed}) + "\n")

    def add(self, cut: Cut) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(vars(cut)) + "\n")

    @staticmethod
    def read(path: Path) -> tuple[Log, list[Cut]]:
        """Raises ConfigInvalid where it is none."""
        try:
            first, *lines = path.read_text().splitlines()
            head = json.loads(first)
            done = [Cut(**{**(row := json.loads(line)), "allowed": tuple(row["allowed"])}) for line in lines]
            return Log(path, head["on"], int(head["seed"])), done
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigInvalid(f"{path} is not the log of a run: {error}") from error


def _begun(asked: argparse.Namespace) -> tuple[Log, list[Cut]]:
    """The run that is gone on with, or a new one."""
    if asked.resume is not None:
        return Log.read(asked.resume)
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    log = Log(asked.log or rootfs.cache_folder() / "power" / f"{asked.on}-{seed}.jsonl", asked.on, seed)
    log.begin()
    return log, []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(victim: Callable[[Path], Victim], log: Log, done: list[Cut], asked: argparse.Namespace) -> None:
    """Cut until there are as many as asked for; each is in the log and in `done` at once."""
    begun, before = time.monotonic(), len(done)
    with tempfile.TemporaryDirectory(prefix="edgert-power-") as folder:
        _say("preparing what is cut")
        rig = Rig(victim(Path(folder)), log.seed)
        try:
            for cut, left in cuts(rig, range(len(done) + 1, asked.cuts + 1), asked.cold, _say):
                done.append(cut)
                log.add(cut)
                if cut.problem:
                    log.path.with_suffix(f".{cut.number}.img").write_bytes(left)
                word = cut.problem or f"release {cut.serves} after {cut.serves_after_s:.1f} s"
                _say(f"{cut.number}: {cut.operation} at {cut.at}, {cut.lost_sectors} sectors lost: {word}")
                if len(done) % PROGRESS_CUTS == 0:
                    each_s, failed = (
                        (time.monotonic() - begun) / (len(done) - before),
                        sum(bool(c.problem) for c in done),
                    )
                    left_min = (asked.cuts - len(done)) * each_s / 60
                    _say(f"{len(done)} of {asked.cuts}, {failed} failed; about {left_min:.0f} min to go")
        finally:
            rig.victim.off()


def main() -> None:
    asked = _arguments()
    if asked.without_fsync:
        os.environ["EDGERT_RIG_WITHOUT_FSYNC"] = "1"
    try:
        log, done = _begun(asked)
    except EdgeRTError as error:
        sys.exit(f"error: {error.message}")
    victim, why_not = VICTIMS[log.on]
    if reason := why_not():
        sys.exit(f"error: the power of a {log.on} victim cannot be cut here: {reason}")
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell started this in the background
        signal.signal(number, signal.default_int_handler)
    try:
        _run(victim, log, done, asked)
    except KeyboardInterrupt:
        _say("interrupted")
    except (EdgeRTError, OSError, RuntimeError) as error:  # the rig's, or the machine's: what was found stays
        _say(f"error: {error}")
    print(summary(done, log.seed))
    if len(done) < asked.cuts:
        _say(f"go on with: python -m hil.power_cuts --cuts {asked.cuts} --resume {log.path}")
    sys.exit(any(cut.problem for cut in done) or len(done) < asked.cuts)


if __name__ == "__main__":
    main()
