"""The health check: golden inputs through the daemon's own socket, answers against the signed ones."""

from __future__ import annotations

import statistics
import time
from typing import Any

from edgert.checks import golden_samples as golden
from edgert.client.blocking import Client
from edgert.config import DeviceConfig, StateDir
from edgert.errors import HealthCheckFailed
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore

TIMEOUT_S = 60.0


def check_served(model: str, store: SlotStore, state: StateDir, config: DeviceConfig) -> dict[str, Any]:
    """Ask for each golden sample by itself and compare. Raises HealthCheckFailed, DaemonUnreachable, ModelNotFound."""
    version = load_live(store, config)
    release = version.manifest.release
    names = [spec.name for spec in version.manifest.inputs]
    times_ms: list[float] = []
    with Client(state.socket(config), timeout_s=TIMEOUT_S) as client:
        served = client.metadata(model)
        if served["release"] != release:
            raise HealthCheckFailed(f"the daemon serves release {served['release']}, the slots say {release}")
        # Two artifacts of a ladder may be of one engine, in different precisions.
        artifact = version.manifest.artifact(served["artifact"])

        def ask(sample: golden.Arrays) -> golden.Arrays:
            began = time.perf_counter()
            answer = client.infer(model, dict(zip(names, sample, strict=True)), cache=False)
            times_ms.append((time.perf_counter() - began) * 1e3)
            return [answer[spec.name] for spec in version.manifest.outputs]

        worst = golden.check(version, artifact, ask)
    return {
        "model": model,
        "release": release,
        "engine": artifact.engine,
        "artifact": artifact.id,
        "ok": True,
        "samples": len(times_ms),
        "worst": worst,
        "p50_ms": round(statistics.median(times_ms), 4),
    }
