"""The null engine: the specification of the interface, without a vendor.

Its artifact is a JSON file. `{"op": "copy"}` copies input i to output i; `{"op": "sum"}` fills each output, per item,
with the sum of input 0; `{"op": "add"}` gives each output the sum of all inputs; `{"op": "zeros"}` ignores the inputs.
One run takes `delay_s` plus `item_s` per item.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines import Engine, EngineOptions, LocalArtifact, Session
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec

OPS = ("copy", "sum", "add", "zeros")


class NullEngine(Engine):
    name = "null"

    def version(self) -> str:
        return "1"

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> NullSession:
        try:
            program = json.loads(artifact.path.read_bytes())
            op = str(program["op"])
            delay_s, item_s = float(program.get("delay_s", 0)), float(program.get("item_s", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed(
                f"null engine cannot read {artifact.path.name}: {error}; give {{'op': 'copy'}}"
            ) from error
        if op not in OPS:
            raise EngineFailed(f"null engine knows {', '.join(OPS)}, not {op!r}")
        return NullSession(artifact.inputs, artifact.outputs, op, delay_s, item_s)


class NullSession(Session):
    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        op: str,
        delay_s: float,
        item_s: float = 0.0,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._op = op
        self._delay_s, self._item_s = delay_s, item_s

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        if self._delay_s or self._item_s:
            time.sleep(self._delay_s + self._item_s * len(tensors[0]))
        if self._op == "copy":
            return [array.astype(spec.dtype) for array, spec in zip(tensors, self.outputs, strict=False)]
        if self._op == "zeros":
            return [np.zeros((len(tensors[0]), *spec.item_shape), spec.dtype) for spec in self.outputs]
        if self._op == "add":
            return [np.sum(tensors, axis=0, dtype=spec.dtype) for spec in self.outputs]
        first = tensors[0]
        sums = first.reshape(len(first), -1).sum(axis=1)
        return [_filled(sums, spec) for spec in self.outputs]

    def close(self) -> None:
        return None


def _filled(sums: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Return an array of `spec` in which each element of an item equals the item's entry in `sums`."""
    shape = (len(sums), *spec.item_shape)
    return np.broadcast_to(sums.reshape(-1, *(1 for _ in spec.item_shape)), shape).astype(spec.dtype)
