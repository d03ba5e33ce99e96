"""Samples of different lengths, for buckets: padded to the largest bucket, with unpadded lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.errors import CalibrationInvalid
from edgert.tensors import TensorSpec

Arrays = dict[str, NDArray[Any]]


def stack_all(
    where: str, specs: Sequence[TensorSpec], rows: Sequence[Sequence[NDArray[Any]]], buckets: Buckets
) -> Arrays:
    """Return items of any lengths as one padded array for each input, with the items' `lengths`.

    `rows` has the items of each input. Raises CalibrationInvalid if a sample does not fit the model, or if its inputs
    differ in length; the message names the samples' origin `where`.
    """
    arrays: Arrays = {}
    lengths_of: dict[str, list[int]] = {}
    for spec, items in zip(specs, rows, strict=True):
        arrays[spec.name], lengths = _stacked(where, spec, items, buckets)
        if lengths:
            lengths_of[spec.name] = lengths
    for name, lengths in lengths_of.items():
        if lengths != (first := next(iter(lengths_of.values()))):
            i = next(i for i, (one, other) in enumerate(zip(lengths, first, strict=True)) if one != other)
            raise CalibrationInvalid(
                f"the inputs of sample {i} of {where} differ in length: {name!r} has {lengths[i]}, and another input has "
                f"{first[i]}; give all inputs of a sample the same length"
            )
    return arrays | {"lengths": np.array(next(iter(lengths_of.values()), []), np.int64)}


def check_lengths(where: str, lengths: Sequence[int], buckets: Buckets) -> None:
    """Raise CalibrationInvalid if a sample is empty or longer than every bucket."""
    for i, length in enumerate(lengths):
        if not 1 <= length <= buckets.largest:
            raise CalibrationInvalid(
                f"sample {i} of {where} has length {length} along axis {buckets.axis!r}; the buckets hold 1 to {buckets.largest}: "
                "cut the sample like your application, or add a larger bucket"
            )


def in_buckets(
    path: Path, inputs: Mapping[str, NDArray[Any]], stated: NDArray[Any] | None, buckets: Buckets
) -> tuple[Arrays, NDArray[np.int64]]:
    """Return samples padded to the largest bucket, and their lengths. Raises CalibrationInvalid.

    The values after the end of a sample become padding. `stated` has the length of each sample; None if each sample is
    as long as the arrays.
    """
    count = len(next(iter(inputs.values())))
    lengths_of = {place.name: inputs[place.name].shape[place.axis] for place in buckets.inputs}
    if len(set(lengths_of.values())) > 1:
        raise CalibrationInvalid(
            f"the inputs of {path} differ in length along axis {buckets.axis!r}: {lengths_of}; give all inputs the same length"
        )
    longest = next(iter(lengths_of.values()))
    lengths = np.full(count, longest, np.int64) if stated is None else np.asarray(stated)
    if lengths.shape != (count,) or lengths.dtype.kind not in "iu" or (count and int(lengths.max()) > longest):
        raise CalibrationInvalid(
            f"array 'lengths' of {path} is {lengths.dtype} of shape {list(lengths.shape)}; give one whole number per sample "
            f"in shape [{count}], at most {longest}, the length of the arrays"
        )
    check_lengths(str(path), lengths.tolist(), buckets)
    arrays = dict(inputs)
    for place in buckets.inputs:
        items = inputs[place.name]
        shape = list(items.shape)
        shape[place.axis] = buckets.largest
        arrays[place.name] = np.full(shape, place.value, items.dtype)
        for row, item, length in zip(arrays[place.name], items, lengths, strict=True):
            part = (*[slice(None)] * (place.axis - 1), slice(0, int(length)))
            row[part] = item[part]
    return arrays, lengths.astype(np.int64)


def _stacked(
    where: str, spec: TensorSpec, rows: Sequence[NDArray[Any]], buckets: Buckets
) -> tuple[NDArray[Any], list[int]]:
    places = [place for place in buckets.inputs if place.name == spec.name]
    if not places:
        return np.stack(rows) if rows else np.empty((0, *spec.item_shape), spec.dtype), []
    lengths = [int(row.shape[places[0].axis - 1]) for row in rows]
    check_lengths(where, lengths, buckets)
    whole = buckets.spec_at(spec, buckets.largest).item_shape
    array = np.full((len(rows), *whole), places[0].value, spec.dtype)
    for to, row in zip(array, rows, strict=True):
        to[tuple(slice(0, n) for n in row.shape)] = row
    return array, lengths
