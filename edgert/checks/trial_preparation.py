"""Selects the limits of a trial that this device can judge, before the trial starts."""

from __future__ import annotations

from dataclasses import replace

from edgert import machine
from edgert.bundle.manifest import Manifest
from edgert.config import DeviceConfig
from edgert.errors import TransitionRefused
from edgert.versions.installed import load_version
from edgert.versions.slot_store import SlotStore
from edgert.versions.trial_limits import TrialLimits


def fit_for(limits: TrialLimits, store: SlotStore, config: DeviceConfig) -> tuple[TrialLimits, tuple[str, ...]]:
    """Return the limits that this device can judge, and a note about each omitted limit.

    Raises TransitionRefused for a limit that this device can never measure. The trial then does not start.
    """
    if "temp_c" in limits.bounds and machine.temp_c() is None:
        raise TransitionRefused("this device has no readable thermometer: leave the limit temp_c out for it")
    if "agreement" not in limits.bounds:
        return limits, ()
    slots = store.read()
    old, new = slots.live, slots.spare
    if old is None or not old.good or new is None:
        bounds = {name: value for name, value in limits.bounds.items() if name != "agreement"}
        return replace(limits, bounds=bounds), ("agreement: no earlier version exists for the comparison",)
    before = load_version(store.live_folder(slots), old.digest, config).manifest
    after = load_version(store.slot_folder(slots.spare_slot), new.digest, config).manifest
    if what := other_inputs_or_answers(before, after):
        raise TransitionRefused(
            f"release {new.release} has other {what} than release {old.release}, so their answers cannot be "
            "compared: leave the limit agreement out"
        )
    return limits, ()


def other_inputs_or_answers(before: Manifest, after: Manifest) -> str:
    """Return a difference that gives two versions different tensors for a request; "" if there is none.

    The earlier version gets the tensors of the version on trial, so both must compute tensors in the same way.
    """
    for what in ("inputs", "outputs", "preprocess", "sound", "series", "text"):
        if getattr(before, what) != getattr(after, what):
            return what
    if before.text is not None and after.text is not None:
        files = (before.file(before.text.tokenizer), after.file(after.text.tokenizer))
        return "" if files[0].sha256 == files[1].sha256 else "text (its tokenizer)"
    return ""
