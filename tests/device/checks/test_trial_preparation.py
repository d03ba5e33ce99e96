"""The limits of a trial that this device can measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.bundle.manifest import FileEntry, Manifest
from edgert.bundle.text_rules import TOKENIZER, Text
from edgert.checks.trial_preparation import measurable_limits, tensor_difference
from edgert.config import read_config
from edgert.errors import TransitionRefused
from edgert.tensors import TensorSpec
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore
from edgert.versions.trial_limits import TrialLimits
from tests.support.devices import Device, a_device

LIMITS = TrialLimits({"agreement": 0.9, "p99_ms": 5.0}, 60.0)


def prepared(device: Device, store: SlotStore) -> tuple[dict[str, float], tuple[str, ...]]:
    limits, left_out = measurable_limits(LIMITS, store, read_config(device.state))
    return limits.bounds, left_out


def test_the_agreement_limit_is_dropped_for_a_first_version_and_refused_for_an_incomparable_version() -> None:
    with a_device(started=False) as device:
        store = device.stage()
        assert prepared(device, store) == (
            {"p99_ms": 5.0},
            ("agreement: no earlier version exists for the comparison",),
        )
        store.activate(60)
        store.mark_good()
        device.stage(release=2)
        assert prepared(device, store) == (LIMITS.bounds, ())
        device.stage(release=3, item_shape=(5,))
        with pytest.raises(TransitionRefused, match=r"releases 1 and 3 differ in inputs.*omit the limit"):
            prepared(device, store)


def of_text(manifest: Manifest, sha256: str, max_tokens: int = 4) -> Manifest:
    return replace(
        manifest,
        inputs=(TensorSpec("x", "INT64", (-1, 4)),),
        text=Text(TOKENIZER, "x", max_tokens),
        files=(*manifest.files, FileEntry(TOKENIZER, 2, sha256)),
    )


def test_versions_with_other_tokens_for_a_text_cannot_be_compared() -> None:
    """The earlier version gets the tokens that the version on trial computed."""
    with a_device(started=False) as device:
        store = device.stage()
        store.activate(60)
        manifest = load_live(store, read_config(device.state)).manifest
    before = of_text(manifest, "0" * 64)
    assert tensor_difference(before, of_text(manifest, "0" * 64)) == ""
    assert tensor_difference(before, of_text(manifest, "0" * 64, max_tokens=3)) == "text"
    assert tensor_difference(before, of_text(manifest, "1" * 64)) == "the tokenizer"
    assert tensor_difference(before, replace(before, text=None)) == "text"
