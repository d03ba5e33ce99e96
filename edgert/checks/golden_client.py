"""Sends golden samples through the daemon's socket, like an app: one at a time, without the cache.

The requests are probes: telemetry does not count them as requests of apps.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

from edgert.checks import golden_samples as golden
from edgert.checks.golden_samples import Arrays
from edgert.client.blocking import Client
from edgert.config import DeviceConfig
from edgert.errors import EdgeRTError
from edgert.state_dir import StateDir
from edgert.versions.installed import InstalledVersion

ANSWER_S_MAX = 60.0  # the longest wait for the answer to one golden sample


class GoldenClient:
    """A client of the live version of one model. Close it, or use it in a `with` block."""

    def __init__(self, version: InstalledVersion, state: StateDir, config: DeviceConfig) -> None:
        """Raises the errors of `Client`; also BundleCorrupt if the samples cannot be read."""
        manifest = version.manifest
        self.samples = list(golden.samples(version, as_sent=True))
        self._model = manifest.model
        self._inputs, self._outputs = (
            [spec.name for spec in specs] for specs in (manifest.app_inputs, manifest.app_outputs)
        )
        if manifest.golden_raw:
            self._inputs = list(manifest.sent_inputs)
        self._client = Client(state.socket(config.socket), timeout_s=ANSWER_S_MAX, probe=True)

    def __enter__(self) -> GoldenClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def served(self) -> dict[str, Any]:
        """Return the daemon's description of the model that it serves."""
        return self._client.metadata(self._model)

    def infer(self, sample: Arrays) -> Arrays:
        """Return the model's answer to one of `samples`. Raises the daemon's errors."""
        answer = self._client.infer(self._model, dict(zip(self._inputs, sample, strict=True)), cache=False)
        return [answer[name] for name in self._outputs]

    def infer_many(self, count: int, for_s: float) -> int:
        """Send up to `count` samples, for at most `for_s` seconds; return the number of answers and refusals."""
        until = time.monotonic() + for_s
        answered = 0
        for sample in itertools.islice(itertools.cycle(self.samples), count):
            if time.monotonic() >= until:
                break
            with contextlib.suppress(EdgeRTError):  # the worker counts this request as failed
                self.infer(sample)
            answered += 1
        return answered
