"""Tensors in the terms of the Open Inference Protocol v2: name, datatype, shape, request, response.

https://github.com/kserve/open-inference-protocol (datatype names: `FP32`, `INT8`, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from edgert.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Open Inference Protocol name -> NumPy name. BYTES tensors, such as a JPEG, are sent as UINT8.
NUMPY_NAMES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
ITEM_BYTES = {name: 1 if name == "BOOL" else int(name.lstrip("UINTFP")) // 8 for name in NUMPY_NAMES}
DATATYPES = {numpy_name: name for name, numpy_name in NUMPY_NAMES.items()}
MAX_RANK = 8


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    `shape` counts elements per axis; -1 stands for an axis whose length each request chooses. Axis 0 is the batch axis
    of every model for which `batchable` is true.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.datatype not in NUMPY_NAMES:
            raise RequestError(f"tensor {self.name!r} has datatype {self.datatype!r}; known: {', '.join(NUMPY_NAMES)}")
        if len(self.shape) > MAX_RANK or any(n < -1 for n in self.shape):
            raise RequestError(
                f"tensor {self.name!r} has shape {list(self.shape)}; at most {MAX_RANK} axes, each >= 0 or -1"
            )

    @property
    def form(self) -> str:
        """The datatype and shape for messages: `FP32 [N, 3, 224, 224]`, with `any` for another open axis."""
        lengths = (str(n) if n != -1 else "any" if axis else "N" for axis, n in enumerate(self.shape))
        return f"{self.datatype} [{', '.join(lengths)}]"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of `datatype`."""
        import numpy as np  # imported here, because the supervisor handles specs without NumPy

        return np.dtype(NUMPY_NAMES[self.datatype])

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one item: `shape` without the batch axis."""
        return self.shape[1:]

    @property
    def may_be_scores(self) -> bool:
        """Whether the tensor may hold class scores: [N, C] of floats, or of a quantized model's integers."""
        return len(self.shape) == 2 and (self.datatype.startswith("FP") or self.datatype in ("INT8", "UINT8", "INT16"))

    @property
    def ranks_classes(self) -> bool:
        """Whether the tensor may hold scores of several classes, of which one is the highest."""
        return self.may_be_scores and self.shape[1] >= 2

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TensorSpec:
        return cls(str(value["name"]), str(value["datatype"]), tuple(int(n) for n in value["shape"]))


def batchable(specs: Sequence[TensorSpec]) -> bool:
    """Return whether items of different requests may be joined along axis 0."""
    return all(spec.shape and spec.shape[0] == -1 for spec in specs)


def byte_rows(values: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return files or texts as UINT8 [N, bytes], one per row. Zeros pad the shorter rows."""
    import numpy as np

    rows = np.zeros((len(values), max(map(len, values), default=0)), np.uint8)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = np.frombuffer(value, np.uint8)
    return rows


def fits(spec: TensorSpec, datatype: str, shape: Sequence[int]) -> bool:
    return (
        datatype == spec.datatype
        and len(shape) == len(spec.shape)
        and all(want in (-1, got) for want, got in zip(spec.shape, shape, strict=True))
    )


class StageTimes(NamedTuple):
    """Microseconds that one request spent in each stage of the daemon, in serving order.

    The frame header and spans derive from this list. Spans add `encode`, whose time is known only after the answer.
    `engine_us` is the time of the whole batch that contained the request; `queue_us` is the wait for this batch.
    """

    decode_us: int = 0
    preprocess_us: int = 0
    cache_us: int = 0
    queue_us: int = 0
    engine_us: int = 0
    postprocess_us: int = 0


@dataclass(frozen=True)
class InferResponse:
    """The answer: arrays by output name, the version that computed them, and the time of each stage.

    `batch` is the number of items in the engine run that computed this answer; 0 for a cache hit.
    """

    model: str
    release: int
    outputs: dict[str, NDArray[Any]]
    stages: StageTimes
    batch: int
    cache_hit: bool
