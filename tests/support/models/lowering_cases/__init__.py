"""The graphs that every operator of the TFLite lowering is tested with, by family."""

from __future__ import annotations

import sys

from tests.support.models.lowering_cases import basic, convolution, einsum, elements, normalization, recurrent, resize
from tests.support.models.tflite_cases import Case

ALL_CASES: list[Case] = [
    case for family in (basic, convolution, einsum, elements, normalization, recurrent, resize) for case in family.CASES
]


# The ONNX Runtime of Python 3.10 takes opsets up to 23.
RUNNABLE_CASES = [case for case in ALL_CASES if case.opset < 24 or sys.version_info >= (3, 11)]


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)
