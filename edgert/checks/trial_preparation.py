"""What goes with a trial's limits besides watching them: whether a device can judge them, and golden samples as traffic."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace

from edgert import machine as host
from edgert.checks import golden_samples as golden
from edgert.client.blocking import Client
from edgert.config import DeviceConfig, StateDir
from edgert.errors import EdgeRTError, TransitionRefused
from edgert.versions.installed import InstalledVersion, load_version
from edgert.versions.slot_store import SlotStore
from edgert.versions.trial_limits import TrialLimits

ASK_S_MAX = 30.0  # for one golden sample


class GoldenAsker:
    """Asks golden samples through the daemon's own socket, on behalf of a watch that saw too little traffic."""

    def __init__(self, version: InstalledVersion, state: StateDir, config: DeviceConfig) -> None:
        self._version, self._state, self._config = version, state, config

    def ask(self, count: int, for_s: float) -> int:
        """Ask `count` of them, one after the other, for at most `for_s`; how many were answered or refused."""
        names = [spec.name for spec in self._version.manifest.inputs]
        model, until = self._version.manifest.model, time.monotonic() + for_s
        samples = itertools.cycle(list(golden.samples(self._version)))
        asked = 0
        with Client(self._state.socket(self._config), timeout_s=ASK_S_MAX) as client:
            while asked < count and time.monotonic() < until:
                with contextlib.suppress(EdgeRTError):  # it is counted as failed where it was
                    client.infer(model, dict(zip(names, next(samples), strict=True)), cache=False)
                asked += 1
        return asked


def fit_for(limits: TrialLimits, store: SlotStore, config: DeviceConfig) -> tuple[TrialLimits, tuple[str, ...]]:
    """The limits as this device can judge it for the version that is staged, and what it leaves out, in words.

    Raises TransitionRefused for a limit that nothing here could ever tell: better now than at the end of the watch.
    """
    if "temp_c" in limits.bounds and host.temp_c() is None:
        raise TransitionRefused("this device has no thermometer that can be read: leave the limit temp_c out for it")
    if "agreement" not in limits.bounds:
        return limits, ()
    slots = store.read()
    old, new = slots.live, slots.spare
    if old is None or not old.good or new is None:
        bounds = {name: value for name, value in limits.bounds.items() if name != "agreement"}
        return replace(limits, bounds=bounds), ("agreement: there is no version before to agree with",)
    before = load_version(store.live_folder(slots), old.digest, config).manifest
    after = load_version(store.slot_folder(slots.spare_slot), new.digest, config).manifest
    for what in ("inputs", "outputs", "preprocess"):
        if getattr(before, what) != getattr(after, what):
            raise TransitionRefused(
                f"release {new.release} has other {what} than release {old.release}, so their answers cannot be "
                "compared: leave the limit agreement out"
            )
    return limits, ()
