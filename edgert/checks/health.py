"""The health check: sends golden samples through the daemon's socket, and checks the answers."""

from __future__ import annotations

import statistics
import time
from typing import Any

from edgert.checks import golden_samples as golden
from edgert.checks.golden_client import GoldenClient
from edgert.config import DeviceConfig
from edgert.errors import HealthCheckFailed
from edgert.state_dir import StateDir
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore


def check_served(model: str, store: SlotStore, state: StateDir, config: DeviceConfig) -> dict[str, Any]:
    """Check the daemon's answers to the golden samples. Raises HealthCheckFailed and the daemon's errors."""
    version = load_live(store, config)
    release = version.manifest.release
    times_ms: list[float] = []
    with GoldenClient(version, state, config) as client:
        served = client.served()
        if served["release"] != release:
            raise HealthCheckFailed(
                f"the daemon serves release {served['release']}, but release {release} is live in the slots: restart the daemon"
            )
        artifact = version.manifest.artifact(served["artifact"])

        def infer(sample: golden.Arrays) -> golden.Arrays:
            began = time.perf_counter()
            answer = client.infer(sample)
            times_ms.append((time.perf_counter() - began) * 1e3)
            return answer

        worst = golden.check(version, artifact, infer, as_sent=True)
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
