"""The preprocessor of a manifest's rule, for images or for signals."""

from __future__ import annotations

from edgert.bundle.rules import Preprocess
from edgert.bundle.signal_rules import Series, Sound
from edgert.processing.preprocess import Preprocessor
from edgert.processing.signals import SignalPreprocessor
from edgert.tensors import TensorSpec

InputRule = Preprocess | Sound | Series


def preprocessor(rule: InputRule, spec: TensorSpec) -> Preprocessor | SignalPreprocessor:
    """Return what applies `rule` to the input `spec`. Raises EngineMissing where a codec is missing."""
    return Preprocessor(rule, spec) if isinstance(rule, Preprocess) else SignalPreprocessor(rule, spec)
