"""The preprocessor of a manifest's rule, for images, signals or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgert.bundle.rules import Preprocess
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.text_rules import Text
from edgert.processing.images.preprocess import Preprocessor
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.processing.text import TextPreprocessor
from edgert.tensors import TensorSpec

InputRule = Preprocess | Sound | Series | Text
InputPreprocessor = Preprocessor | SignalPreprocessor | TextPreprocessor


def preprocessor(rule: InputRule, inputs: Sequence[TensorSpec], read: Callable[[str], bytes]) -> InputPreprocessor:
    """Return the preprocessor of `rule` for `inputs`; `read` returns a file that the rule names.

    Raises EngineMissing if a package that the rule needs is missing.
    """
    if isinstance(rule, Text):
        return TextPreprocessor(rule, inputs, read(rule.tokenizer))
    spec = next(spec for spec in inputs if spec.name == rule.input)
    return Preprocessor(rule, spec) if isinstance(rule, Preprocess) else SignalPreprocessor(rule, spec)
