"""Timing of candidates by `edgertd bench`, on this machine or on a device over its transport.

A candidate replaces a simpler candidate only if it is faster by more than FASTER_SHARE. So noise in the times does not
change the choice.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.checks.bench_answer import BenchResult
from edgert.errors import ConfigInvalid, ErrorText
from edgert_deploy.devices.bench import bench_folder, write_spec
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote_daemon import DaemonCrashed, RemoteDaemon
from edgert_deploy.devices.transports import open_transport
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.processes.sandbox import Progress

FASTER_SHARE = 0.05
SECONDS = 5.0  # the timed rounds of all candidates of a target take about this time in total
ERROR_SHARE_MAX = 0.005  # the largest error of a median, as a share of the median: a tenth of FASTER_SHARE


@dataclass(frozen=True)
class Timing:
    """The times of a candidate on the machine `where`. With an `error`, all numbers are 0."""

    where: str
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    threads: int = 0
    runs: int = 0
    engine_version: str = ""
    error: str = ""


Timings = Mapping[str, Timing]  # candidate id -> timing


@dataclass(frozen=True)
class Measurer:
    """Times candidates on `device` or, without a device, on this machine.

    A device times candidates for its own profile. This machine times candidates for profiles of its processor. After
    the measurement, only compiled engines stay on the device (`STATE/cache`).
    """

    device: Device | None = None

    def covers(self, profile: DeviceProfile) -> bool:
        if self.device is not None:
            return profile.name == self.device.profile
        return not profile.machines or platform.machine() in profile.machines

    def __call__(
        self, profile: DeviceProfile, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
    ) -> Timings:
        if self.device is not None:
            name = self.device.name
            return _measured(name, self.device, evaluation, candidates, lambda line: progress(f"{name}: {line}"))
        with tempfile.TemporaryDirectory(prefix="edgert-bench-") as state:
            this_machine = Device("this machine", "local", state, profile.name, state)
            return _measured(
                "here", this_machine, evaluation, candidates, lambda line: progress(f"measuring here: {line}")
            )


def fastest(candidates: Sequence[Candidate], timings: Timings) -> Candidate:
    """Return the fastest candidate. `candidates` are in order, the simplest first.

    A later candidate counts as faster only if its time is shorter by more than FASTER_SHARE. If no candidate has a
    time, the result is the first candidate.
    """
    timed = [c for c in candidates if c.id in timings and not timings[c.id].error]
    best = timed[0] if timed else candidates[0]
    for candidate in timed[1:]:
        if timings[candidate.id].p50_ms < (1 - FASTER_SHARE) * timings[best.id].p50_ms:
            best = candidate
    return best


def measurer_on(device: Device, targets: Iterable[DeviceProfile]) -> Measurer:
    """Return a Measurer for `device`. Raises ConfigInvalid if no target has the profile of the device."""
    names = [profile.name for profile in targets]
    if device.profile not in names:
        raise ConfigInvalid(
            f"{device.name} has profile {device.profile}, which is not among the targets ({', '.join(names)}): "
            f"add --target {device.profile}, or measure on another device"
        )
    return Measurer(device)


def _measured(
    where: str, device: Device, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
) -> Timings:
    """Time the candidates together. If an engine crashes on a candidate, time each candidate alone."""
    daemon = RemoteDaemon(open_transport(device), device, progress)
    try:
        results = _results(daemon, evaluation, candidates, progress)
    except DaemonCrashed as error:
        progress(f"{error.message}; each artifact is timed alone")
        results = [
            result for candidate in candidates for result in _measured_alone(daemon, evaluation, candidate, progress)
        ]
    finally:
        daemon.transport.close()
    return {result.id: _timing(where, result) for result in results}


def _measured_alone(
    daemon: RemoteDaemon, evaluation: Evaluation, candidate: Candidate, progress: Progress
) -> Sequence[BenchResult]:
    try:
        return _results(daemon, evaluation, [candidate], progress)
    except DaemonCrashed as error:
        return [BenchResult(candidate.id, candidate.artifact.engine, error=ErrorText.of(error))]


def _results(
    daemon: RemoteDaemon, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
) -> Sequence[BenchResult]:
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder:
        _write_candidates(Path(folder), evaluation, candidates)
        return bench_folder(daemon, Path(folder), SECONDS, progress).results


def _write_candidates(folder: Path, evaluation: Evaluation, candidates: Sequence[Candidate]) -> None:
    """Write the candidates' artifacts and one golden sample."""
    entries = []
    for candidate in candidates:
        artifact = candidate.artifact
        (folder / candidate.id).mkdir()
        for path in (artifact.path, *artifact.companions):
            shutil.copyfile(path, folder / candidate.id / path.name)
        entry = {"id": candidate.id, "engine": artifact.engine, "path": f"{candidate.id}/{artifact.path.name}"}
        entries.append({**entry, "sha256": hashlib.sha256(artifact.path.read_bytes()).hexdigest()})
    source = evaluation.source
    inputs = evaluation.golden_inputs(1)
    write_spec(folder, source.inputs, source.outputs, inputs, entries, source.buckets, ERROR_SHARE_MAX)


def _timing(where: str, result: BenchResult) -> Timing:
    version, times = result.engine_version or "", result.times
    if times is None:
        error = result.error.message if result.error else f"the answer of edgertd bench on {where} has no times"
        return Timing(where, engine_version=version, error=error)
    return Timing(where, times.p50_ms, times.p90_ms, result.threads or 0, times.runs, version)
