"""Measurements on a device: of artifacts that run directly in the engine, or of the live version.

The host sends a folder with the artifacts for `edgertd bench`, and afterwards removes this folder from the device. Only
compiled models (`STATE/cache`) stay on the device. The packager measures its candidates in the same way.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgert.bundle.buckets import Buckets
from edgert.bundle.bundle_file import Bundle, open_bundle
from edgert.bundle.manifest import TargetEntry
from edgert.checks.bench import FORMAT, SPEC
from edgert.checks.bench_answer import BenchAnswer
from edgert.checks.status import DeviceStatus
from edgert.durations import duration_text
from edgert.errors import BundleCorrupt, EdgeRTError, EngineMissing
from edgert.printable import counted
from edgert.tensors import TensorSpec
from edgert.typed_json import to_json
from edgert_deploy.common.quantities import size_text
from edgert_deploy.common.temporary_folder import temporary_folder
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon, answer_of
from edgert_deploy.devices.transports import LineSink, Transport, in_folder

BENCH_S_MAX = 3600.0  # this limit is long, because an engine may compile the artifact first


def bench_live_on(
    device: Device, transport: Transport, model: str, seconds: float, clients: int, progress: LineSink
) -> BenchAnswer:
    """Return the answer of `edgertd bench --model`, which sends requests to the live version like an app."""
    words = ("bench", "--model", model, "--for", duration_text(seconds), "--clients", str(clients))
    return answer_of(BenchAnswer, RemoteDaemon(transport, device, progress).call(*words, timeout_s=BENCH_S_MAX))


def bench_bundle_on(
    device: Device, transport: Transport, path: Path, seconds: float, progress: LineSink
) -> BenchAnswer:
    """Measure the bundle's artifacts for the device.

    The runs of the artifacts alternate with runs of the live version, if there is one.

    Raises NotCompatible, EngineMissing, BundleError, and the errors of the link and the device.
    """
    daemon = RemoteDaemon(transport, device, progress)
    facts = daemon.named(daemon.status())
    with temporary_folder("bench") as temporary, open_bundle(path, trusted=None) as bundle:
        (folder := temporary / "sent").mkdir()
        _write_bundle(bundle, bundle.manifest.target_for(facts.profile, facts.machine), facts, folder)
        model = facts.model(bundle.manifest.model)
        beside = ("--model", model.model) if model is not None and model.live is not None else ()
        return bench_folder(daemon, folder, seconds, progress, *beside)


def bench_folder(daemon: RemoteDaemon, folder: Path, seconds: float, progress: LineSink, *words: str) -> BenchAnswer:
    """Send a folder that `write_spec` completed. Return the answer of `edgertd bench` on this folder."""
    incoming, name = f"{daemon.device.state}/incoming", f"bench-{uuid.uuid4().hex}"
    remote = f"{incoming}/{name}"
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size_bytes = sum(path.stat().st_size for path in paths)
    progress(f"sending {counted(len(paths), 'file')}, {size_text(size_bytes)}")
    try:
        for path in paths:
            daemon.transport.put(path, f"{remote}/{path.relative_to(folder).as_posix()}")
        answer = daemon.call("bench", remote, *words, "--for", duration_text(seconds), timeout_s=BENCH_S_MAX)
        return answer_of(BenchAnswer, answer)
    finally:
        with contextlib.suppress(EdgeRTError):
            daemon.transport.run(in_folder(incoming, ["rm", "-rf", f"./{name}"]), QUICK_S_MAX)


def write_spec(
    folder: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    samples: Sequence[npt.NDArray[Any]],
    artifacts: Sequence[Mapping[str, str]],
    buckets: Buckets | None = None,
    error_share_max: float = 0.0,
) -> None:
    """Write the inputs and the description for `edgertd bench` into `folder`.

    Args:
        folder: The folder with the files of `artifacts`.
        inputs, outputs: The tensors of the model.
        samples: An array for each input.
        artifacts: A dict for each artifact, with the keys id, engine, path and sha256.
        buckets: The sizes that the engine runs, if the model has open axes.
        error_share_max: The measurement ends early if the error of each figure is below this share of the figure.
    """
    names = [f"input-{i}.npy" for i in range(len(samples))]
    for name, sample in zip(names, samples, strict=True):
        np.save(folder / name, sample, allow_pickle=False)
    value = {
        "format": FORMAT,
        "inputs": [spec.as_json() for spec in inputs],
        "outputs": [spec.as_json() for spec in outputs],
        "samples": names,
        "artifacts": list(artifacts),
        "buckets": to_json(buckets),
        "error_share_max": error_share_max,
    }
    (folder / SPEC).write_text(json.dumps(value))


def _write_bundle(bundle: Bundle, target: TargetEntry, facts: DeviceStatus, folder: Path) -> None:
    """Write the artifacts whose engine the device has, and one golden sample."""
    manifest = bundle.manifest
    artifacts = [manifest.artifact(name) for name in target.artifacts]
    chosen = [artifact for artifact in artifacts if artifact.engine in facts.engines]
    if not chosen:
        raise EngineMissing(
            f"{facts.device} has none of the engines {', '.join(a.engine for a in artifacts)}: "
            f"install one with edgert bootstrap {facts.device} --engines {artifacts[0].engine}"
        )
    bundle.unpack(folder, frozenset({*manifest.golden_inputs, *(path for entry in chosen for path in entry.files)}))
    samples = []
    for path in manifest.golden_inputs:
        try:
            samples.append(np.load(folder / path, allow_pickle=False)[:1])
        except (OSError, ValueError) as error:
            raise BundleCorrupt(f"the golden inputs {path} cannot be read: {error}; build the bundle again") from error
        (folder / path).unlink()
    entries = [
        {"id": entry.id, "engine": entry.engine, "path": entry.entry, "sha256": manifest.file(entry.entry).sha256}
        for entry in chosen
    ]
    write_spec(folder, manifest.inputs, manifest.outputs, samples, entries, manifest.buckets)
