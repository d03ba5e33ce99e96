"""Selects the limits of a trial that this device can measure, before the trial starts."""

from __future__ import annotations

from dataclasses import replace

from edgert import machine
from edgert.bundle.manifest import Manifest
from edgert.config import DeviceConfig
from edgert.errors import TransitionRefused
from edgert.versions.installed import load_version
from edgert.versions.slot_store import SlotStore
from edgert.versions.trial_limits import TrialLimits


def measurable_limits(
    limits: TrialLimits, store: SlotStore, config: DeviceConfig
) -> tuple[TrialLimits, tuple[str, ...]]:
    """Return the limits that this device can measure now, and a note about each omitted limit.

    Raises TransitionRefused for a limit that this device can never measure. The trial then does not start.
    """
    if "temp_c" in limits.bounds and machine.temp_c() is None:
        raise TransitionRefused("this device has no readable thermometer, so it cannot judge temp_c: omit this limit")
    if "agreement" not in limits.bounds:
        return limits, ()
    slots = store.read()
    old, new = slots.live, slots.spare
    if old is None or not old.good or new is None:
        bounds = {name: value for name, value in limits.bounds.items() if name != "agreement"}
        return replace(limits, bounds=bounds), ("agreement: no earlier version exists for the comparison",)
    before = load_version(store.live_folder(slots), old.digest, config).manifest
    after = load_version(store.slot_folder(slots.spare_slot), new.digest, config).manifest
    if difference := tensor_difference(before, after):
        raise TransitionRefused(
            f"releases {old.release} and {new.release} differ in {difference}, so the device cannot compare their "
            "answers: omit the limit agreement"
        )
    return limits, ()


def tensor_difference(before: Manifest, after: Manifest) -> str:
    """Return the part of the manifest that makes two versions compute different tensors, or "".

    For the comparison, the earlier version gets the tensors that the version on trial computed
    from a request. So both versions must compute tensors in the same way.
    """
    for key in ("inputs", "outputs", "preprocess", "sound", "series", "text"):
        if getattr(before, key) != getattr(after, key):
            return key
    if before.text is not None and after.text is not None:
        files = (before.file(before.text.tokenizer), after.file(after.text.tokenizer))
        return "" if files[0].sha256 == files[1].sha256 else "the tokenizer"
    return ""
