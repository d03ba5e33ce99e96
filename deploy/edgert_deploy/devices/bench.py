"""Measuring on a device, through its transport: a bundle's artifacts beside the live version, or the live version itself.

Nothing is installed and nothing changes there but what engines compile (`STATE/cache`); what was sent is removed again.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from edgert.bundle.bundle_file import Bundle, open_bundle
from edgert.bundle.manifest import TargetEntry
from edgert.checks.bench import FORMAT, SPEC
from edgert.checks.status import DeviceStatus
from edgert.errors import BundleCorrupt, EdgeRTError, EngineMissing
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports import Transport

BENCH_S_MAX = 3600.0  # an engine may build its plan first
QUICK_S_MAX = 60.0

Say = Callable[[str], None]


def bench_live_on(
    device: Device, transport: Transport, model: str, seconds: float, clients: int, say: Say
) -> dict[str, Any]:
    """What `edgertd bench --model` finds on the device, asked as apps ask."""
    words = ("bench", "--model", model, "--seconds", f"{seconds:g}", "--clients", str(clients))
    return RemoteDaemon(transport, device, say).call(*words, timeout_s=BENCH_S_MAX)


def bench_bundle_on(device: Device, transport: Transport, path: Path, seconds: float, say: Say) -> dict[str, Any]:
    """The bundle's artifacts for the device, engine alone, beside the live version of the model where one serves.

    Raises NotCompatible, EngineMissing, BundleError, and what the link and the device answer.
    """
    daemon = RemoteDaemon(transport, device, say)
    facts = daemon.status()
    remote = f"{device.state}/incoming/bench-{uuid.uuid4().hex}"
    try:
        with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder, open_bundle(path, trusted=None) as bundle:
            work = Path(folder) / "work"
            work.mkdir()
            target = bundle.manifest.target_for(facts.profile, facts.machine)
            for name in write_work(bundle, target, facts, work):
                say(f"sending {name}")
                transport.put(work / name, str(PurePosixPath(remote) / name))
            model = facts.model(bundle.manifest.model)
        beside = ("--model", bundle.manifest.model) if model is not None and model.live is not None else ()
        return daemon.call("bench", remote, *beside, "--seconds", f"{seconds:g}", timeout_s=BENCH_S_MAX)
    finally:
        with contextlib.suppress(EdgeRTError):
            transport.run(["rm", "-rf", remote], QUICK_S_MAX)


def write_work(bundle: Bundle, target: TargetEntry, facts: DeviceStatus, folder: Path) -> list[str]:
    """The folder that `edgertd bench` reads, of the artifacts whose engine the device has; the names of its files."""
    manifest = bundle.manifest
    artifacts = [manifest.artifact(name) for name in target.artifacts]
    chosen = [artifact for artifact in artifacts if artifact.engine in facts.engines]
    if not chosen:
        raise EngineMissing(f"{facts.device} has none of the engines {', '.join(a.engine for a in artifacts)}")
    wanted = {*manifest.golden_inputs, *(path for artifact in chosen for path in artifact.files)}
    bundle.unpack(folder, frozenset(wanted))
    samples = []
    for i, path in enumerate(manifest.golden_inputs):
        try:
            sample = np.load(folder / path, allow_pickle=False)[:1]
        except (OSError, ValueError) as error:
            raise BundleCorrupt(f"the golden inputs {path} cannot be read: {error}") from error
        (folder / path).unlink()
        samples.append(f"input-{i}.npy")
        np.save(folder / samples[-1], sample, allow_pickle=False)
    value = {
        "format": FORMAT,
        "inputs": [spec.as_json() for spec in manifest.inputs],
        "outputs": [spec.as_json() for spec in manifest.outputs],
        "samples": samples,
        "artifacts": [
            {"id": one.id, "engine": one.engine, "path": one.entry, "sha256": manifest.file(one.entry).sha256}
            for one in chosen
        ],
    }
    (folder / SPEC).write_text(json.dumps(value))
    return [SPEC, *samples, *sorted({path for artifact in chosen for path in artifact.files})]
