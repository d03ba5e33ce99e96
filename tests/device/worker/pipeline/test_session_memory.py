"""The memory of a model's sessions, and the tensors that have its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgert.bundle.rules import Classify, Smooth
from edgert.bundle.signal_rules import Sound
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.protocol.wire import WireTensor
from edgert.worker.pipeline.session_memory import MemoryForm
from tests.support.stand_ins.loaded_models import installed

SOUND = Sound("x", 16_000, 8, step=4, lead=2, features="samples")


def form(folder: Path, **options: Any) -> MemoryForm:
    version, _, _ = installed(folder, item_shape=(8,), **options)
    manifest = version.manifest
    pre = None if manifest.sound is None else SignalPreprocessor(manifest.sound, manifest.inputs[0])
    return MemoryForm(manifest, pre)


def tensors(*shapes: tuple[int, ...]) -> list[WireTensor]:
    return [
        WireTensor(i, "FP32", shape, memoryview(np.zeros(shape, np.float32).tobytes()))
        for i, shape in enumerate(shapes)
    ]


def test_a_model_with_neither_state_nor_steps_has_no_memory(tmp_path: Path) -> None:
    found = form(tmp_path)
    assert not found.has_memory
    assert not found.in_turn
    assert found.size_bytes == 0


def test_the_memory_of_a_session_holds_state_and_the_rest_of_a_signal_and_scores(tmp_path: Path) -> None:
    rules = {"sound": SOUND, "classify": Classify("y", smooth=Smooth("mean", 3))}
    found = form(tmp_path, op="add", state_id="", rules=rules)
    assert found.has_memory
    assert found.in_turn
    assert found.size_bytes == 8 * 4 + 8 * 4 + 2 * 8 * 4
    assert [array.shape for array in found.first.arrays] == [(1, 8), (2,), (0, 8)]


def test_only_tensors_of_the_right_form_fit_a_session_memory(tmp_path: Path) -> None:
    rules = {"sound": SOUND, "classify": Classify("y", smooth=Smooth("mean", 3))}
    found = form(tmp_path, op="add", state_id="", rules=rules)
    assert found.fits(tensors((1, 8), (8,), (2, 8)))
    assert found.fits(tensors((1, 8), (0,), (0, 8)))
    for shapes in (
        [(1, 8), (8,)],
        [(1, 8), (9,), (2, 8)],
        [(1, 8), (8,), (3, 8)],
        [(1, 8), (8,), (2, 9)],
        [(0, 8), (8,), (2, 8)],
        [(1, 8), (8, 1), (2, 8)],
        [(), (), ()],
    ):
        assert not found.fits(tensors(*shapes)), shapes
