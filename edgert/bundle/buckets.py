"""Buckets: the few lengths of one open axis that a model is built for, such as 32, 64, 128 tokens.

An app sends an input of any length up to the largest bucket. The worker pads the input to the smallest bucket that is
long enough, and cuts the answer to the input's length.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgert.errors import BundleError, RequestError
from edgert.tensors import TensorSpec
from edgert.typed_json import Closed

SIZES_MAX = 16
LENGTH_MAX = 2**24


@dataclass(frozen=True)
class PaddedInput:
    """An input that the worker pads along `axis` with `value`, up to the length of the bucket."""

    name: str
    axis: int
    value: float = 0.0


@dataclass(frozen=True)
class CutOutput:
    """An output that the worker cuts: `axis` has one element per `divisor` input elements, rounded up."""

    name: str
    axis: int
    divisor: int = 1

    def length(self, length: int) -> int:
        """Return the length along `axis` for inputs of `length`."""
        return -(-length // self.divisor)


@dataclass(frozen=True)
class Buckets(Closed):
    """The lengths of one open axis that a model is built for.

    Attributes:
        sizes: The lengths, in ascending order.
        golden_lengths: The length of each golden sample. The arrays of golden samples have the largest size.
    """

    axis: str
    sizes: tuple[int, ...]
    inputs: tuple[PaddedInput, ...]
    outputs: tuple[CutOutput, ...] = ()
    golden_lengths: tuple[int, ...] = ()

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    @property
    def form(self) -> str:
        """The axis, its sizes and the padding values, for messages: `tokens: 32, 64, 128; pads ids with 1`."""
        pads = [f"{place.name} with {place.value:g}" for place in self.inputs if place.value]
        return f"{self.axis}: {', '.join(map(str, self.sizes))}" + (f"; pads {', '.join(pads)}" if pads else "")

    def size_for(self, length: int) -> int:
        """Return the smallest size of at least `length`. Raises RequestError if there is none."""
        for size in self.sizes:
            if 1 <= length <= size:
                return size
        raise RequestError(
            f"the request has length {length} along axis {self.axis!r}; the model was built for 1 to {self.largest}: "
            "send a length within this range, or build the model with a larger bucket"
        )

    def spec_at(self, spec: TensorSpec, length: int) -> TensorSpec:
        """Return the spec of an input or output for inputs of `length`."""
        shape = list(spec.shape)
        for place in self.inputs:
            if place.name == spec.name:
                shape[place.axis] = length
        for cut in self.outputs:
            if cut.name == spec.name:
                shape[cut.axis] = cut.length(length)
        return TensorSpec(spec.name, spec.datatype, tuple(shape))


def check_buckets(buckets: Buckets, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `buckets` fits a model of these inputs and outputs."""
    sizes = buckets.sizes
    if not 1 <= len(sizes) <= SIZES_MAX or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1]:
        raise BundleError(
            f"buckets {list(sizes)}: give 1 to {SIZES_MAX} different lengths from 1 up, in ascending order"
        )
    if sizes[-1] > LENGTH_MAX:
        raise BundleError(f"bucket {sizes[-1]}: a bucket has at most {LENGTH_MAX} elements")
    for kind, specs, places in (("input", inputs, buckets.inputs), ("output", outputs, buckets.outputs)):
        stated = sorted((place.name, place.axis) for place in places)
        if stated != sorted((s.name, axis) for s in specs for axis, n in enumerate(s.shape) if n == -1 and axis):
            raise BundleError(f"the buckets of {buckets.axis!r} do not name the open axis of every {kind}")
    for cut in buckets.outputs:
        if cut.divisor < 1:
            raise BundleError(f"output {cut.name!r} has the divisor {cut.divisor}; give at least 1")
    for length in buckets.golden_lengths:
        if not 1 <= length <= sizes[-1]:
            raise BundleError(f"a golden sample has length {length}; the buckets allow 1 to {sizes[-1]}")
