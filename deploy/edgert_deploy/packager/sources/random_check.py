"""Refuses models whose answers depend on random numbers, as with a Dropout in training mode.

The golden samples of such a model would fail on devices, because each run gives other answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.nodes import nodes_of

OPERATORS = frozenset(
    {
        "Bernoulli",
        "Dropout",  # random in training mode only
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


def check_answers_repeat(proto: Any, run: Callable[[], list[Any]]) -> None:
    """Raise SourceInvalid if two runs on one sample differ, and the model has one of OPERATORS.

    A model may multiply its random numbers by 0.
    """
    node = next((node for node in nodes_of(proto.graph) if node.op_type in OPERATORS), None)
    if node is not None and not all(map(_same, run(), run())):
        raise SourceInvalid(
            f"the model draws random numbers ({node.op_type} {(node.name or node.output[0])[:80]!r}), so each run on a sample gives another answer, and no device could "
            "check its answers: export the model in inference mode (in PyTorch: model.eval()), or with the random numbers as an input"
        )


def _same(a: Any, b: Any) -> bool:
    return not isinstance(a, np.ndarray) or np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
