"""Shared parts of the benchmarks: a device with a model, load from client processes, rows and tables.

Every figure is compared with something measured in the same run, because machines are shared and noisy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.bundles import make_null_bundle
from edgert.bundle.signing import new_key

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "examples/digits"

Ask = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """The results of a group of clients. Times are microseconds."""

    p50_us: float
    p99_us: float
    p999_us: float
    requests_per_s: float


@dataclass(frozen=True)
class BenchModel:
    """A model to build and serve: its file and samples, one of which is sent. INT8 unless `precision` says otherwise."""

    name: str
    source: Path
    calibration: Path
    holdout: Path
    precision: str = "int8"

    def item(self) -> NDArray[Any]:
        """Return one sample [1, ...], contiguous."""
        (values,) = (values for name, values in np.load(self.holdout).items() if name != "labels")
        return np.ascontiguousarray(values[:1])


DIGITS_MODEL = BenchModel("digits", DIGITS / "digits.onnx", DIGITS / "calibration.npz", DIGITS / "holdout.npz")


@contextmanager
def digits_device(config: str = "") -> Iterator[tuple[Path, Path]]:
    """Run a daemon that serves digits; yield its state folder and socket, which are removed afterwards."""
    with device_with([DIGITS_MODEL], config) as (state, path):
        yield state, path


@contextmanager
def device_with(models: Sequence[BenchModel], config: str = "") -> Iterator[tuple[Path, Path]]:
    """Run a daemon that serves the models; yield its state folder and socket, which are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="edgert-bench-"))
    state = folder / "state"
    try:
        edgert("keys", "new", "--dir", str(folder / "keys"))
        start(state, (folder / "keys/default.pem").read_bytes(), config)
        for model in models:
            bundle = folder / f"{model.name}.edgert"
            edgert(
                "build", str(model.source), "--name", model.name, "--precision", model.precision,
                "--calibration", str(model.calibration), "--holdout", str(model.holdout), "--target", "this-machine",
                "--key", str(folder / "keys/default.key.pem"), "--out", str(bundle),
            )  # fmt: skip
            deploy(state, model.name, bundle)
        yield state, state / "edgert.sock"
    finally:
        if state.exists():
            edgertd(state, "stop")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def null_device(items: Mapping[str, NDArray[Any]], config: str = "", *, delay_s: float = 0.0) -> Iterator[Path]:
    """Run a daemon with a null-engine model per entry and input; yield its state folder."""
    folder = Path(tempfile.mkdtemp(prefix="edgert-bench-"))
    state, key = folder / "state", new_key()
    try:
        start(state, key.public.pem(), config)
        for model, item in items.items():
            deploy(state, model, make_null_bundle(folder, key, model, item, delay_s=delay_s))
        yield state
    finally:
        if state.exists():
            edgertd(state, "stop")
        shutil.rmtree(folder, ignore_errors=True)


def start(state: Path, public_pem: bytes, config: str = "") -> None:
    """Start a daemon on a new state folder. `config` is appended to its config.toml."""
    (state / "keys").mkdir(parents=True)
    (state / "keys" / "bench.pem").write_bytes(public_pem)
    (state / "config.toml").write_text(f'device = "d-bench"\nprofile = "this-machine"\n{config}')
    edgertd(state, "start")


def deploy(state: Path, model: str, bundle: Path) -> None:
    """Make the bundle's model live and mark it good."""
    edgertd(state, "install", str(bundle))
    edgertd(state, "activate", model)
    edgertd(state, "mark-good", model)


def serving(state: Path, model: str) -> dict[str, Any]:
    """Return the daemon's status of a model."""
    return dict(next(m for m in edgertd(state, "status")["models"] if m["model"] == model)["serving"])


def pin(pids: Sequence[int], cores: set[int] | None) -> None:
    """Pin every thread of the processes to `cores`, or to all cores if None."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores or set(range(os.cpu_count() or 1)))


def own_mb(pid: int) -> float:
    """Return the private memory of a process (RssAnon) in MB; unlike PSS it does not depend on other processes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 / 1e6


def cpu_us(pids: Sequence[int]) -> float:
    """Return the processor time of the processes so far, without those that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e6 / os.sysconf("SC_CLK_TCK")


def processes(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def edgert(*words: str) -> None:
    _command("edgert_deploy.cli", *words)


def edgertd(state: Path, *words: str) -> dict[str, Any]:
    return dict(json.loads(_command("edgert.cli", "--state", str(state), *words, "--json")))


def _command(package: str, *words: str) -> str:
    """Run one of our commands and return its stdout; end the benchmark with its message on failure."""
    code = f"import sys; from {package} import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout


class Clients:
    """`count` client processes that send requests in a closed loop, on command, for a given time.

    Each process calls `make`, which returns the function that makes one request. The clients stay connected between
    rounds, so that rounds of different servers can be interleaved.
    """

    def __init__(self, count: int, make: Callable[[int], Ask], cores: set[int] | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs, make, number, cores), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def round(self, seconds: float) -> Load:
        """Let every client send requests for `seconds`."""
        for pipe in self._pipes:
            pipe.send(seconds)
        times: list[float] = []
        for pipe in self._pipes:
            times += pipe.recv()
        times.sort()
        return Load(
            p50_us=times[len(times) // 2],
            p99_us=times[min(len(times) - 1, int(len(times) * 0.99))],
            p999_us=times[min(len(times) - 1, int(len(times) * 0.999))],
            requests_per_s=len(times) / seconds,
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(5)


def _client(pipe: Connection, make: Callable[[int], Ask], number: int, cores: set[int] | None) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    ask = make(number)
    for _ in range(20):
        ask()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        times = []
        now = time.perf_counter
        until = now() + seconds
        while (began := now()) < until:
            ask()
            times.append((now() - began) * 1e6)
        pipe.send(times)


def median_load(loads: Sequence[Load]) -> Load:
    return Load(
        *(
            statistics.median(values)
            for values in zip(*((x.p50_us, x.p99_us, x.p999_us, x.requests_per_s) for x in loads), strict=True)
        )
    )


def emit(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    """Print rows as JSON lines, or as a Markdown table of `columns`."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
