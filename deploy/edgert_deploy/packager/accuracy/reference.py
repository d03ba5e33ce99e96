"""The reference for an artifact: the FP32 source's answers, and the user's statements about the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Ctc, Detect
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet

Outputs = list[NDArray[Any]]  # one array an output, samples along axis 0
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Reference:
    """The FP32 source's `answers` to the hold-out, and the meaning of its outputs.

    `classify`, `detect` and `ctc` are the rules by which devices make answers. `class_names` are the labels of the
    first two. `image_size` is the height and width of a detector's input.
    """

    specs: tuple[TensorSpec, ...]
    answers: Outputs
    holdout: CalibrationSet
    class_names: tuple[str, ...] = ()
    classify: Classify | None = None
    detect: Detect | None = None
    ctc: Ctc | None = None
    image_size: tuple[int, int] | None = None

    @property
    def all_rows(self) -> Rows:
        return np.arange(len(self.answers[0]))
