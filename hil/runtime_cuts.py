"""Power cuts while a runtime is installed and on trial: a complete runtime, old or new, must be in use.

    python -m hil.runtime_cuts --cuts 60 --seed 1      # as root; on this machine's kernel

HOME is in an ext4 on a disk that loses unflushed writes (`support/disk.py`). The device's own script installs a new
environment, finishes it and puts it on trial; the power is cut at a random write or flush. Then the disk is mounted,
and the unit's `before-start` runs under another boot id. A stand-in answers for the daemon; `test_bootstrap.py` uses
the real daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgert.environment import FINISH
from edgert.errors import ConfigInvalid
from edgert_deploy.bootstrap.runtime import script_text
from hil.support.disk import LossyDisk
from hil.support.mounted import MountedDisk, ext4, why_not
from tests.support.stand_ins.runtimes import NEW, OLD, STAND_IN

DISK_BYTES = 48 * 1024**2
FILES = 60
OPERATION_S_MAX = 300.0
_INSTALL = """
set -e
mkdir -p "$1/venvs/$2" && cp -r "$3/." "$1/venvs/$2"
sh -c "$4" sh "$1/venvs/$2" '{"edgert": "2"}' "$1/wheels"
exec sh "$1/runtime.sh" trial monitor "$5" 60 "$2" echo
"""


class Rig:
    """A device's HOME, new for each cut. If `sync` is False, nothing is flushed, so that cuts must fail."""

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self._folder = folder
        self._path = os.environ["PATH"]
        if not sync:
            (folder / "sync").symlink_to("/bin/true")
            self._path = f"{folder}:{self._path}"
        for runtime in (OLD, NEW):
            _make_runtime(folder / "runtimes" / runtime, runtime)
        made = folder / "made"
        (made / "venvs").mkdir(parents=True)
        subprocess.run(["cp", "-r", str(folder / "runtimes" / OLD), str(made / "venvs" / OLD)], check=True)
        (made / "venvs" / OLD / ".complete").write_text('{"edgert": "1"}')
        (made / "venv").symlink_to(self.home / "venvs" / OLD)
        (made / "runtime.sh").write_bytes(script_text())
        (folder / "state").mkdir()
        self._image = ext4(folder / "ext4", made, DISK_BYTES)

    @property
    def home(self) -> Path:
        return self._folder / "home"

    def cut(self, strike_at: int | None, chance: random.Random) -> tuple[str, int]:
        """Cut the power before the write or flush number `strike_at`. With None, cut at the end of the operation.

        Return the problem, or "", and the number of writes and flushes.
        """
        disk = LossyDisk(self._folder / "disk", self._image)
        mounted = MountedDisk(self._folder, disk, self.home, DISK_BYTES)
        try:
            mounted.on()
            begun = disk.requests
            disk.strike_at = None if strike_at is None else begun + strike_at
            ended = self._operate(disk)
            requests = disk.requests - begun
            mounted.off()
            disk.cut(chance)
            mounted.on()
            on_trial = (self.home / "trial").exists()
            self._script("before-start", boot="b2")
            return self._judge(ended, on_trial), requests
        finally:
            mounted.off()
            disk.close()

    def _operate(self, disk: LossyDisk) -> bool:
        """Install the new runtime and put it on trial. Return whether the script ended before the cut."""
        words = [str(self.home), NEW, str(self._folder / "runtimes" / NEW), FINISH, str(self._folder / "state")]
        process = self._popen(["sh", "-c", _INSTALL, "sh", *words], "b1")
        until = time.monotonic() + OPERATION_S_MAX
        while process.poll() is None and not disk.struck.is_set():
            if time.monotonic() > until:
                raise ConfigInvalid("the trial did not end")
            time.sleep(0.002)
        ended = process.poll() is not None and not disk.struck.is_set()
        disk.struck.set()
        _end(process)
        return ended

    def _judge(self, ended: bool, on_trial: bool) -> str:
        in_use = (self.home / "venv").readlink().name
        if in_use not in (OLD, NEW):
            return f"{in_use!r} is in use"
        if ended and in_use != NEW:
            return "an acknowledged change is lost"
        if on_trial and in_use != OLD:
            return "a trial was not ended by the boot"
        if (self.home / "trial").exists():
            return "the trial did not end"
        want, got = _content(self._folder / "runtimes" / in_use), _content(self.home / "venvs" / in_use)
        damaged = [name for name in want if got.get(name) != want[name]]
        if damaged:
            return f"{in_use} is in use, and {len(damaged)} of its files are not whole, such as {damaged[0]}"
        return ""

    def _script(self, *words: str, boot: str) -> None:
        process = self._popen(["sh", str(self.home / "runtime.sh"), *words], boot)
        process.wait(OPERATION_S_MAX)
        _end(process)

    def _popen(self, words: list[str], boot: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "EDGERT_BOOT_ID": boot, "PATH": self._path}
        return subprocess.Popen(
            words, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill every process in the session of `process`, including the stand-in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_runtime(folder: Path, name: str) -> None:
    """Make an environment with large and small files, like a real one, and with the commands that the script calls."""
    chance = random.Random(name)
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    for number in range(FILES):
        (folder / "lib" / f"{number}.py").write_bytes(chance.randbytes(chance.choice((200, 3_000, 40_000))))
    (folder / "bin/edgertd").write_text(STAND_IN.replace("FAILING", "none"))
    (folder / "bin/edgertd").chmod(0o755)
    (folder / "bin/python").symlink_to("/bin/sh")


def _content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".complete"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the power while a runtime is installed and on trial; needs root.")
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--without-fsync", action="store_true", help="Flush nothing: cuts must then fail.")
    given = parser.parse_args()
    if os.geteuid() != 0 or (reason := why_not()):
        sys.exit(f"error: {reason if os.geteuid() == 0 else 'only root can mount file systems'}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="edgert-cuts-") as folder:
        rig = Rig(Path(folder), sync=not given.without_fsync)
        problem, requests = rig.cut(None, random.Random(given.seed))
        print(f"seed {given.seed}; not cut: {problem or 'kept'}, {requests} writes and flushes", flush=True)
        failed += bool(problem)
        for number in range(1, given.cuts + 1):
            chance = random.Random(f"{given.seed}-{number}")
            at = chance.randrange(requests)
            problem, _ = rig.cut(at, chance)
            if problem:
                failed += 1
                print(f"cut {number} before request {at}: {problem}", flush=True)
            elif number % 10 == 0:
                print(f"{number} cuts, {failed} failed", flush=True)
    print(f"{given.cuts} cuts, seed {given.seed}, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
