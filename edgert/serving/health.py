"""The health check: golden inputs through the daemon's own socket, answers against the signed ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from edgert.client import Client
from edgert.config import DeviceConfig, StateDir
from edgert.errors import HealthCheckFailed, ModelNotFound
from edgert.installer import load_version
from edgert.serving.model import check_golden, read_golden_inputs
from edgert.slots import SlotStore
from edgert.tensors import batchable

TIMEOUT_S = 60.0


def check_served(model: str, store: SlotStore, state: StateDir, config: DeviceConfig) -> dict[str, Any]:
    """Ask for each golden sample by itself and compare. Raises HealthCheckFailed, DaemonUnreachable, ModelNotFound."""
    slots = store.read()
    active = slots.version(slots.active)
    if active is None or slots.active is None:
        raise ModelNotFound(f"model {model} is not active; install and activate a bundle first")
    version = load_version(store.slot_folder(slots.active), active.digest, config)
    golden = read_golden_inputs(version)
    names = [spec.name for spec in version.manifest.inputs]
    single = batchable(version.manifest.inputs)
    count = len(golden[0]) if single else 1
    answers, times_ms = [], []
    with Client(state.socket(config), timeout_s=TIMEOUT_S) as client:
        served = client.metadata(model)
        if served["release"] != active.release:
            raise HealthCheckFailed(f"the daemon serves release {served['release']}, the slots say {active.release}")
        for i in range(count):
            inputs = {n: a[i : i + 1] if single else a for n, a in zip(names, golden, strict=True)}
            began = time.perf_counter()
            answers.append(client.infer(model, inputs, cache=False))
            times_ms.append((time.perf_counter() - began) * 1e3)
    outputs = [np.concatenate([answer[spec.name] for answer in answers]) for spec in version.manifest.outputs]
    artifact = next(a for a in version.artifacts if a.engine == served["engine"])
    return {
        "model": model,
        "release": active.release,
        "engine": artifact.engine,
        "ok": True,
        "samples": count,
        "worst": check_golden(version, artifact, outputs),
        "p50_ms": round(float(np.median(times_ms)), 4),
    }
