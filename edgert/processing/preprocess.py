"""UINT8 values to what the model takes, by the manifest's rule. Pure functions over arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import BundleError
from edgert.manifest import Preprocess
from edgert.tensors import TensorSpec


def byte_spec(rule: Preprocess, spec: TensorSpec) -> TensorSpec:
    """The UINT8 tensor that may be given in place of `spec`."""
    shape = spec.shape
    if rule.layout == "nhwc":
        if len(shape) != 4:
            raise BundleError(f"preprocessing layout nhwc needs an input of 4 axes, {spec.name!r} has {len(shape)}")
        shape = (shape[0], shape[2], shape[3], shape[1])
    return TensorSpec(spec.name, "UINT8", shape)


def preprocessor(rule: Preprocess, spec: TensorSpec) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """A function from UINT8 arrays of `byte_spec` to C-contiguous arrays of `spec`.

    A UINT8 has 256 values, so (value * scale - mean) / std is a look-up in a table made here once.
    """
    values = np.arange(256, dtype=np.float64)
    channels = max(len(rule.mean), len(rule.std))
    if channels > 1 and (len(spec.shape) < 2 or spec.shape[1] != channels):
        raise BundleError(f"preprocessing has {channels} channels, input {spec.name!r} has shape {list(spec.shape)}")
    mean, std = (np.broadcast_to(np.asarray(v, np.float64), channels)[:, None] for v in (rule.mean, rule.std))
    tables = ((values[None] * rule.scale - mean) / std).astype(spec.dtype)
    to_model = (0, 3, 1, 2) if rule.layout == "nhwc" else None

    def one_table(array: NDArray[Any]) -> NDArray[Any]:
        shaped = array.transpose(to_model) if to_model else array
        return np.take(tables[0], np.ascontiguousarray(shaped))

    def table_per_channel(array: NDArray[Any]) -> NDArray[Any]:
        shaped = array.transpose(to_model) if to_model else array
        out = np.empty(shaped.shape, spec.dtype)
        for channel in range(channels):
            np.take(tables[channel], shaped[:, channel], out=out[:, channel])
        return out

    return one_table if channels == 1 else table_per_channel
