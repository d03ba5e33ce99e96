"""Building side by side: the artifacts that a bundle will surely need, each in a process of its own, into the cache.

The build flow then finds them there. It stays a plain sequence, and what it measures is measured on a quiet machine.
As many processes run at once as cores and free memory allow. They end with their parent, whichever way it ends: a
child reads its standard input, which closes when the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import BuildFailed, EdgeRTError
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.build_cache import BuildCache, CachedBuilder, cache_key
from edgert_deploy.packager.builders import Precision, builder_for
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

CHILD = "from edgert_deploy.packager.parallel_builds import child; child()"
# A process takes 1 to 2 s to import its tools: smaller models are built in that time.
SOURCE_BYTES_MIN = 4 * 1024**2
# What a process takes: its tools, some copies of the model, the samples and what they become on the way.
CHILD_BYTES = 700 * 1024**2
COPIES_OF_SOURCE = 14
COPIES_OF_SAMPLES = 3
MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Job:
    """One artifact to build: `name` is what progress calls it."""

    name: str
    engine: str
    profile: DeviceProfile
    precision: Precision


def build_ahead(
    source: SourceModel,
    calibration: CalibrationSet,
    jobs: Sequence[Job],
    cache: BuildCache,
    progress: Callable[[str], None],
    processes: int = 0,
) -> None:
    """Build what the cache lacks of `jobs`, `processes` at once (0: as many as fit; no more than one: leave it).

    A job that fails is left to the build flow, which meets the error itself and knows what it means there. Raises
    BuildFailed where a process died: the same job would take this one along.
    """
    missing = {cache_key(j.engine, source, calibration, j.profile, j.precision): j for j in jobs}
    missing = {key: job for key, job in missing.items() if not cache.has(key)}
    if not processes:
        processes = _processes(source, calibration) if source.size_bytes >= SOURCE_BYTES_MIN else 1
    if min(processes, len(missing)) < 2:
        return
    with tempfile.TemporaryDirectory(prefix="edgert-ahead-") as folder:
        shared = Path(folder) / "inputs"
        with shared.open("wb") as file:
            pickle.dump((source, calibration, cache), file, protocol=5)
        words = [[str(shared), pickle.dumps(job).hex()] for job in missing.values()]
        _run(words, processes, Path(folder), progress)


def _processes(source: SourceModel, calibration: CalibrationSet) -> int:
    samples = sum(array.nbytes for array in calibration.inputs.values())
    each = CHILD_BYTES + COPIES_OF_SOURCE * source.size_bytes + COPIES_OF_SAMPLES * samples
    return min(len(os.sched_getaffinity(0)), int(MEMORY_SHARE * free_memory_bytes() / each))


def free_memory_bytes() -> int:
    """What can be had without swapping: MemAvailable, less where a control group allows less."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(found, default=0))


def child() -> None:
    """What a child process does: one job of `_run`. An error of ours is the build flow's to meet."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # vendors' tools print there
    shared, words = sys.argv[1:]
    source, calibration, cache = pickle.loads(Path(shared).read_bytes())
    job: Job = pickle.loads(bytes.fromhex(words))
    builder = CachedBuilder(builder_for(job.engine), cache)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EdgeRTError):
        print(f"{job.name}: building {job.engine} {job.precision}", file=lines)
        builder.build(
            source, calibration, job.profile, job.precision, Path(folder), lambda line: print(line, file=lines)
        )


def _end_with_parent() -> None:
    # Not sys.stdin: its lock, held by a thread when Python ends, is fatal.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _run(jobs: Sequence[Sequence[str]], processes: int, folder: Path, progress: Callable[[str], None]) -> None:
    """Keep `processes` children busy until every job is done; none outlives this call."""
    waiting, running = list(jobs), 0
    said: queue.SimpleQueue[str | int] = queue.SimpleQueue()  # a line, or the exit code of a child
    children: list[subprocess.Popen[str]] = []
    try:
        while waiting or running:
            while waiting and running < processes:
                children.append(_start(waiting.pop(0), folder, said))
                running += 1
            heard = said.get()
            if isinstance(heard, str):
                progress(heard)
                continue
            running -= 1
            if heard:
                died = f"died of signal {-heard}" if heard < 0 else f"ended with {heard}"
                raise BuildFailed(f"a builder's process {died}; free some memory, or build one by one with --jobs 1")
    finally:
        for process in children:
            _end(process)


def _start(words: Sequence[str], folder: Path, said: queue.SimpleQueue[str | int]) -> subprocess.Popen[str]:
    # Isolated (-I), so that neither the working folder nor the environment chooses what the child imports.
    program = f"import sys; sys.path[:] = {sys.path!r}; {CHILD}"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},  # removed by the parent, also when it kills the child
        start_new_session=True,  # Ctrl-C is the parent's to hear: it ends them
    )
    threading.Thread(target=_listen, args=(process, said), daemon=True).start()
    return process


def _listen(process: subprocess.Popen[str], said: queue.SimpleQueue[str | int]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put(line.rstrip("\n"))
    said.put(process.wait())


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and what it started, where it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
