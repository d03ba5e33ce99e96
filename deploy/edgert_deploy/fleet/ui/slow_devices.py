"""Finds slow devices, whose p99 is above the model's target, or far above its usual value.

This module does no I/O. Theory of operation: the limit of a model is its p99 target. A model without a target has a
baseline for each profile: the lower value of its p99 in the last week (from the store) and the present p99 of the
median device. Its limit is SLOW_FACTOR times the baseline. A device is slow if its last P99S_KEPT windows with enough
requests are all above the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_low

from edgert_deploy.fleet.live_fleet import P99S_KEPT, DeviceState

SLOW_FACTOR = 2.0
PEERS_MIN = 3  # the minimum number of devices for a median
COMPARED_EVERY_S = 5.0


class SlowDevices:
    """Finds slow devices and the time when they became slow, by the limit of each (model, profile)."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets
        self.usual_ms: Mapping[tuple[str, str], float] = {}
        self._middle_ms: dict[tuple[str, str], float] = {}
        self._since_ms: dict[tuple[str, str], int] = {}
        self._compared_at = float("-inf")

    def compare(self, devices: Iterable[DeviceState], now: float) -> None:
        """Find the median device of each model and profile, at most every COMPARED_EVERY_S."""
        if now - self._compared_at < COMPARED_EVERY_S:
            return
        self._compared_at = now
        recent: dict[tuple[str, str], list[float]] = {}
        for device in devices:
            for model, line in device.models.items():
                if line.p99s:
                    recent.setdefault((model, device.profile), []).append(line.p99s[-1])
        self._middle_ms = {key: median_low(p99s) for key, p99s in recent.items() if len(p99s) >= PEERS_MIN}

    def why(self, device: DeviceState, wall_ms: int) -> tuple[str, int] | None:
        """Return why a device is slow, and when it became slow (ms since 1970), or None."""
        why = next((why for model in sorted(device.models) if (why := self._why(device, model))), None)
        key = (device.site, device.device)
        if why is None:
            self._since_ms.pop(key, None)
            return None
        return why, self._since_ms.setdefault(key, wall_ms)

    def _why(self, device: DeviceState, model: str) -> str | None:
        p99s, target_ms = device.models[model].p99s, self._targets.get(model)
        if len(p99s) < P99S_KEPT:
            return None
        key = (model, device.profile)
        baselines = [known_ms[key] for known_ms in (self.usual_ms, self._middle_ms) if key in known_ms]
        text = f"{model} p99 {p99s[-1]:.3g} ms"
        if target_ms is not None:
            return f"{text}, target {target_ms:g} ms" if min(p99s) > target_ms else None
        if baselines and min(p99s) > SLOW_FACTOR * min(baselines):
            return f"{text}, {p99s[-1] / min(baselines):.1f} times its baseline"
        return None
