"""Timing candidates: on this machine, or on a device over its transport, by the same `edgertd bench`.

A candidate displaces a simpler one only if it is more than FASTER_SHARE faster: noise must not choose.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from edgert.checks.bench import FORMAT, SPEC
from edgert.errors import ConfigInvalid, DeviceError, EdgeRTError
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports import open_transport
from edgert_deploy.devices.transports.local import LocalTransport
from edgert_deploy.packager.candidates import Candidate
from edgert_deploy.packager.evaluation import Evaluation

FASTER_SHARE = 0.05
SECONDS = 5.0
BENCH_S_MAX = 3600.0  # TensorRT may build its plan first
QUICK_S_MAX = 60.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """How fast a candidate was at one place, or the `error` that prevented it; the numbers are then 0."""

    where: str
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    threads: int = 0
    runs: int = 0
    engine_version: str = ""
    error: str = ""


Timings = Mapping[str, Timing]  # candidate id -> timing


class Measurer(Protocol):
    """Times the candidates of the profiles that it covers."""

    def covers(self, profile: DeviceProfile) -> bool: ...

    def __call__(
        self, profile: DeviceProfile, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
    ) -> Timings: ...


def fastest(candidates: Sequence[Candidate], timings: Timings) -> Candidate:
    """Return the fastest of `candidates`, given simplest first: a later one must be more than FASTER_SHARE faster.

    A candidate without a time is returned only if none has one.
    """
    timed = [c for c in candidates if c.id in timings and not timings[c.id].error]
    best = timed[0] if timed else candidates[0]
    for candidate in timed[1:]:
        if timings[candidate.id].p50_ms < (1 - FASTER_SHARE) * timings[best.id].p50_ms:
            best = candidate
    return best


class MeasureHere:
    """Measures on this machine, for the profiles of its processor."""

    def covers(self, profile: DeviceProfile) -> bool:
        return not profile.machines or platform.machine() in profile.machines

    def __call__(
        self, profile: DeviceProfile, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
    ) -> Timings:
        with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder:
            state, work = str(Path(folder) / "state"), Path(folder) / "work"
            here = Device("this machine", "local", state, profile.name, state)
            _write_work(work, evaluation, candidates)
            daemon = RemoteDaemon(LocalTransport(here), here, lambda line: progress(f"measuring here: {line}"))
            return _bench(daemon, str(work), "here")


class MeasureOn:
    """Measures on `device`, for its profile. Only what engines compiled stays there (`STATE/cache`)."""

    def __init__(self, device: Device, targets: Iterable[DeviceProfile]) -> None:
        names = [profile.name for profile in targets]
        if device.profile not in names:
            raise ConfigInvalid(
                f"{device.name} has profile {device.profile}, which is not among the targets ({', '.join(names)}): "
                f"add --target {device.profile}, or measure on another device"
            )
        self._device = device

    def covers(self, profile: DeviceProfile) -> bool:
        return profile.name == self._device.profile

    def __call__(
        self, profile: DeviceProfile, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
    ) -> Timings:
        device = self._device
        remote = f"{device.state}/incoming/bench-{uuid.uuid4().hex}"
        transport = open_transport(device)
        try:
            with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder:
                work = Path(folder) / "work"
                for name in _write_work(work, evaluation, candidates):
                    progress(f"{device.name}: sending {name}")
                    transport.put(work / name, str(PurePosixPath(remote) / name))
            daemon = RemoteDaemon(transport, device, lambda line: progress(f"{device.name}: {line}"))
            return _bench(daemon, remote, device.name)
        finally:
            with contextlib.suppress(EdgeRTError):
                transport.run(["rm", "-rf", remote], QUICK_S_MAX)
            transport.close()


def _write_work(folder: Path, evaluation: Evaluation, candidates: Sequence[Candidate]) -> list[str]:
    """Write the folder that `edgertd bench` reads, and return the names of its files."""
    folder.mkdir()
    source = evaluation.source
    samples = [f"input-{i}.npy" for i in range(len(source.inputs))]
    for name, array in zip(samples, evaluation.golden_inputs(1), strict=True):
        np.save(folder / name, array, allow_pickle=False)
    names, artifacts = list(samples), []
    for candidate in candidates:
        artifact = candidate.artifact
        (folder / candidate.id).mkdir()
        for path in (artifact.path, *artifact.companions):
            names.append(f"{candidate.id}/{path.name}")
            shutil.copyfile(path, folder / names[-1])
        entry = {"id": candidate.id, "engine": artifact.engine, "path": f"{candidate.id}/{artifact.path.name}"}
        artifacts.append({**entry, "sha256": hashlib.sha256(artifact.path.read_bytes()).hexdigest()})
    value = {
        "format": FORMAT,
        "inputs": [spec.as_json() for spec in source.inputs],
        "outputs": [spec.as_json() for spec in source.outputs],
        "samples": samples,
        "artifacts": artifacts,
    }
    (folder / SPEC).write_text(json.dumps(value))
    return [SPEC, *names]


def _bench(daemon: RemoteDaemon, folder: str, where: str) -> Timings:
    answer = daemon.call("bench", folder, "--seconds", f"{SECONDS:g}", timeout_s=BENCH_S_MAX)
    try:
        return {str(one["id"]): _timing(where, one) for one in answer["results"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DeviceError(
            f"the answer of edgertd bench on {where} has no times: bootstrap the device again (edgert bootstrap)"
        ) from error


def _timing(where: str, one: dict[str, Any]) -> Timing:
    if "error" in one:
        return Timing(where, engine_version=str(one.get("engine_version", "")), error=str(one["error"]["message"]))
    return Timing(
        where,
        float(one["p50_ms"]),
        float(one["p90_ms"]),
        int(one["threads"]),
        int(one["runs"]),
        str(one["engine_version"]),
    )
