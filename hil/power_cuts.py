"""Power cuts: a device loses its power at random moments of slot operations and starts again.

    make hil-power CUTS=200 SEED=7                     # an emulated machine
    python -m hil.power_cuts --on local --cuts 1000    # this machine's kernel: fast

docs/reliability.md describes the test and its results. The state is in an ext4 on a disk that loses unflushed writes
(`support/disk.py`). After a cut, the old or the new version must answer, bit for bit, without an operator, and the
effect of each acknowledged operation must still be present.

Half of the cuts come at a random write or flush of the operation. The other half come at a random time during the
operation or shortly after it.

The emulated machine has its own kernel. Many cuts must fit into an hour, so it resumes from a state that was saved just
after a boot, before its state disk was mounted, with another boot id each time. `--cold N` boots N times for real. With
`--on local`, the disk stops, the processes of the device are killed, and the disk is mounted again.

Each cut is logged when it is judged, and the disk of a failed cut is kept beside the log. A run that ends early prints
its figures, and `--resume LOG` continues it. Each cut has its own random numbers, which depend on the seed and on the
number of the cut. So a resumed run makes the same cuts; only the device is new.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid, DeviceError, EdgeRTError
from hil.support import rootfs
from hil.support.cut_devices import CUT_DEVICES, Agent, CutDevice
from tests.support.servers.hostile_registry import HostileRegistry, hostile_registry

SERVES_S_MAX = 10.0  # the promised limit for the time from the daemon's start to an answer
BEYOND = 1.5  # a cut comes within this multiple of the operation's time, because the page cache is written later
PROGRESS_CUTS = 10
OPERATIONS = ("install", "activate", "mark-good", "rollback", "collect", "channel")

Say = Callable[[str], None]


@dataclass
class Cut:
    """One cut and its result. After the cut, one of the releases `allowed` must serve.

    If `staged` is not None, this release must be in a slot after the cut. `ended` tells whether the operation was
    acknowledged before the cut, so that its effect must still be present.
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
    """A device to cut, with the duration and disk requests of each undisturbed operation."""

    device: CutDevice
    seed: int
    chance: random.Random = field(default_factory=random.Random)
    registry: HostileRegistry | None = None  # the registry that the device follows in the operation `channel`
    only: str = ""  # the only operation to cut; "" means all operations
    seconds: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)

    def begin(self, *, cold: bool = False) -> tuple[Agent, dict[str, Any]]:
        """Switch on, and wait until the daemon answers."""
        boot = uuid.UUID(int=self.chance.getrandbits(128)).hex
        agent = self.device.on(boot, cold=cold)
        return agent, agent.ask("begin", boot=boot)

    def undisturbed(self, agent: Agent, operation: str, release: int = 0) -> None:
        """Run an operation without a cut and note its duration and disk requests."""
        words = self._words(agent, operation, release, 0)
        before = self.device.disk.requests
        self.seconds[operation] = agent.must("operate", **words)["s"]
        self.requests[operation] = max(1, self.device.disk.requests - before)
        agent.must("follow")
        self._settle(agent)

    def again(self, agent: Agent) -> str:
        """Run the follower's round after a cut; return the fault, or ""."""
        assert self.registry is not None
        answer = agent.ask("operate", operation="channel", registry=self.registry.address)
        self._settle(agent)
        return str(answer.get("error", ""))

    def _settle(self, agent: Agent) -> None:
        """If a round of the follower began a trial, wait until the daemon ends the trial."""
        while self.registry is not None and agent.must("slots")["unattended"]:
            time.sleep(0.1)

    def _words(self, agent: Agent, operation: str, release: int, number: int) -> dict[str, str]:
        """Prepare an operation; return the command for the agent. In a channel, each release is a new attempt."""
        if operation not in ("install", "channel"):
            return {"operation": operation}
        bundle = str(agent.must("make", release=release)["bundle"])
        if operation == "install":
            return {"operation": operation, "bundle": bundle}
        assert self.registry is not None and self.device.key is not None  # noqa: PT018
        entry = replace(self.registry.put_release(Path(bundle)), attempt=number + 1)
        self.registry.put_channel(self.device.key, number + 1, entry)
        return {"operation": operation, "registry": self.registry.address}

    def cut(self, agent: Agent, number: int) -> Cut:
        """Prepare an operation, start it, and cut the power during it."""
        now = agent.must("slots")
        back = now["spare"] or [0, False]  # the release of the spare slot, and whether it was marked good
        possible = {"rollback": back[1], "channel": self.registry is not None}
        operation = self.chance.choice([o for o in OPERATIONS if possible.get(o, True) and self.only in ("", o)])
        active, new = int(now["live"]), max(now["ratchet"], now["live"]) + 1
        if operation in ("activate", "mark-good", "collect"):
            self.undisturbed(agent, "install", new)
        if operation in ("mark-good", "collect"):
            self.undisturbed(agent, "activate")
        if operation == "collect":  # collect removes a version that failed its trial
            self.undisturbed(agent, "rollback")
        # A boot ends a trial, so only these operations change the live release. In the operation `channel`, the daemon
        # may end the trial before the cut.
        after = {"mark-good": new, "rollback": int(back[0]), "channel": new}.get(operation, active)
        at, ended = self._interrupted(agent, operation, new, number)
        self.device.off()
        agent.close()
        lost = self.device.disk.cut(self.chance)
        allowed = (after,) if ended and operation != "channel" else tuple(dict.fromkeys((active, after)))
        return Cut(number, operation, at, ended, lost, allowed, new if operation == "install" and ended else None)

    def _interrupted(self, agent: Agent, operation: str, new: int, number: int) -> tuple[str, bool]:
        """Start the operation and wait for the moment to cut.

        Return this moment as text, and whether the operation was acknowledged before it.
        """
        words = self._words(agent, operation, new, number)
        took = self.seconds.get(operation, 0.2)
        if self.chance.random() < 0.5:
            nth = self.chance.randrange(self.requests.get(operation, 8) + 2)
            self.device.disk.strike_at = self.device.disk.requests + nth
            agent.send("operate", **words)
            return f"request {nth}", self._ended(agent, took * 4 + 2.0)
        wait_s = self.chance.uniform(0.0, took * BEYOND)
        agent.send("operate", **words)
        time.sleep(wait_s)
        return f"{wait_s * 1e3:.0f} ms", self._ended(agent, 0.0)

    def _ended(self, agent: Agent, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while not self.device.disk.struck.is_set():
            answer = agent.answer(0.02 if within_s else 0.0)
            if answer is not None:  # an acknowledgement after the cut is ignored
                return "error" not in answer and not self.device.disk.struck.is_set()
            if time.monotonic() >= until:
                return False
        return False


def judged(cut: Cut, found: dict[str, Any]) -> Cut:
    """Return `cut` with the device's answers after the restart, and the problem if there is one."""
    if "error" in found:
        cut.problem = str(found["error"])
        return cut
    cut.serves, cut.serves_after_s = int(found["release"]), float(found["serves_after_s"])
    if cut.serves not in cut.allowed:
        cut.problem = f"release {cut.serves} serves, not one of {cut.allowed}"
    elif not found["exact"]:
        cut.problem = "the answer is not bit-exact"
    elif found["state"] not in ("steady", "staged") or found["live"] != cut.serves:
        cut.problem = f"wrong state of the slots: {found}"
    elif cut.staged is not None and (found["spare"] or [None])[0] != cut.staged:
        cut.problem = f"release {cut.staged} was installed and is missing: {found}"
    return cut


def cuts(rig: Rig, numbers: range, cold: int, say: Say) -> Iterator[tuple[Cut, bytes]]:
    """Make the cuts `numbers`, and yield each cut with the content of the disk.

    After each of the first `cold` cuts, the machine boots for real. If the device does not serve again, the function
    ends early.
    """
    rig.chance = random.Random(f"{rig.seed} {numbers.start - 1}")
    agent, found = rig.begin()
    if "error" in found:
        raise DeviceError(f"the device does not serve before the first cut: {found['error']}")
    say(f"it serves: {found}")
    new = int(agent.must("slots")["ratchet"]) + 1
    for operation in ("install", "activate", "mark-good"):
        rig.undisturbed(agent, operation, new)
    if rig.registry is not None:
        rig.undisturbed(agent, "channel", new + 1)
    for n in numbers:
        rig.chance = random.Random(f"{rig.seed} {n}")
        cut = rig.cut(agent, n)
        left = rig.device.disk.content
        agent, found = rig.begin(cold=n <= cold)
        cut = judged(cut, found)
        if cut.operation == "channel" and not cut.problem:
            cut.problem = rig.again(agent)
        yield cut, left
        if "error" in found:
            return


def summary(done: list[Cut], seed: int) -> str:
    """Return Markdown: a row per operation, and a line on the times."""
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
    parser.add_argument("--on", choices=sorted(CUT_DEVICES), default="machine", help="device to cut [machine]")
    parser.add_argument("--cuts", type=int, default=200, help="number of cuts [200]")
    parser.add_argument("--cold", type=int, default=0, help="number of cuts after which the machine boots for real [0]")
    parser.add_argument("--only", choices=OPERATIONS[:3] + OPERATIONS[4:], default="", help="operation to cut [all]")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random numbers [random]")
    parser.add_argument(
        "--without-fsync",
        action="store_true",
        help="disable fsync (local): proves that the rig finds lost data",
    )
    parser.add_argument("--log", type=Path, help="file for one JSON line per cut [in the cache, named by the seed]")
    parser.add_argument("--resume", type=Path, metavar="LOG", help="continue the run that wrote this file")
    asked = parser.parse_args()
    if asked.resume is not None and (asked.seed is not None or asked.log is not None):
        parser.error("--resume takes seed and log from its file: omit --seed and --log")
    return asked


@dataclass(frozen=True)
class Log:
    """The log of a run: a line about the run, then a JSON line per cut."""

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
        """Read a log. Raises ConfigInvalid if the file `path` is not a log."""
        try:
            first, *lines = path.read_text().splitlines()
            head = json.loads(first)
            done = [Cut(**{**(row := json.loads(line)), "allowed": tuple(row["allowed"])}) for line in lines]
            return Log(path, head["on"], int(head["seed"])), done
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigInvalid(f"{path} is not the log of a run: {error}") from error


def _opened_log(asked: argparse.Namespace) -> tuple[Log, list[Cut]]:
    """Return the log of the run to continue, or the log of a new run."""
    if asked.resume is not None:
        return Log.read(asked.resume)
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    log = Log(asked.log or rootfs.cache_folder() / "power" / f"{asked.on}-{seed}.jsonl", asked.on, seed)
    log.begin()
    return log, []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(device: Callable[[Path], CutDevice], log: Log, done: list[Cut], asked: argparse.Namespace) -> None:
    """Make as many cuts as asked. Write each cut to the log and to `done` at once."""
    begun, before = time.monotonic(), len(done)
    with tempfile.TemporaryDirectory(prefix="edgert-power-") as folder, hostile_registry() as registry:
        _say("preparing the device")
        rig = Rig(device(Path(folder)), log.seed, only=asked.only)
        if rig.device.key is not None:
            rig.registry = registry
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
            rig.device.off()


def main() -> None:
    asked = _arguments()
    if asked.without_fsync:
        os.environ["EDGERT_RIG_WITHOUT_FSYNC"] = "1"
    try:
        log, done = _opened_log(asked)
    except EdgeRTError as error:
        sys.exit(f"error: {error.message}")
    device, why_not = CUT_DEVICES[log.on]
    if reason := why_not():
        sys.exit(f"error: cannot cut the power of the {log.on} device here: {reason}")
    for number in (signal.SIGTERM, signal.SIGINT):  # a background shell starts its processes with these signals ignored
        signal.signal(number, signal.default_int_handler)
    try:
        _run(device, log, done, asked)
    except KeyboardInterrupt:
        _say("interrupted")
    except (EdgeRTError, OSError, RuntimeError) as error:  # the summary of the cuts so far is printed nevertheless
        _say(f"error: {error}")
    print(summary(done, log.seed))
    if len(done) < asked.cuts:
        _say(f"continue with: python -m hil.power_cuts --cuts {asked.cuts} --resume {log.path}")
    sys.exit(any(cut.problem for cut in done) or len(done) < asked.cuts)


if __name__ == "__main__":
    main()
