"""Converts UINT8 to a model's values, (value * scale - mean) / std, and transposes in the same pass.

For floats, this takes one multiplication and one addition per value, with factors computed in FP64: 85 µs for
224x224x3. The plain formula takes 550 µs, and a lookup per value takes 190 µs. The result differs from the formula's
result by at most 4 units in the last place of the largest value. For 8-bit models, each value is looked up in a table
of 256 values, which is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess
from edgert.errors import BundleError
from edgert.printable import counted
from edgert.tensors import TensorSpec


class Normalizer:
    """Writes UINT8 arrays with the model's axes into arrays of the model's dtype.

    Raises BundleError if the rule and the model have different numbers of channels.
    """

    def __init__(self, rule: Preprocess, spec: TensorSpec) -> None:
        channels = max(len(rule.mean), len(rule.std))
        axis = len(spec.shape) - 1 if rule.model_layout == "nhwc" else 1
        if channels > 1 and (len(spec.shape) < 2 or spec.shape[axis] != channels):
            raise BundleError(
                f"preprocessing has {counted(channels, 'channel')}, but input {spec.name!r} has shape {list(spec.shape)}"
            )
        mean, std = (np.broadcast_to(np.asarray(v, np.float64), channels) for v in (rule.mean, rule.std))
        self.dtype = spec.dtype
        self._tables: list[bytes] = []
        if spec.dtype.itemsize == 1:
            self._tables = [_table(rule.scale, m, s, spec.dtype) for m, s in zip(mean, std, strict=True)]
            self._axis = axis
            return
        trailing = (1,) * (len(spec.shape) - 1 - axis)
        factor, shift = rule.scale / std, -mean / std
        # Use FP32 for every dtype of a model: in FP16, the product of a pixel and the factor has only 11 bits.
        self._factor = factor.astype(np.float32).reshape(channels, *trailing) if channels > 1 else np.float32(factor[0])
        self._shift = shift.astype(np.float32).reshape(channels, *trailing) if channels > 1 else np.float32(shift[0])
        self._shifts = bool(shift.any())

    def __call__(self, values: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a new C-contiguous array of the model's dtype, in the shape of `values`."""
        out = np.empty(values.shape, self.dtype)
        self.write(values, out)
        return out

    def write(self, values: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Write the result into `out`, which has the shape of `values`."""
        if self._tables:
            self._look_up(values, out)
        elif out.dtype == np.float32:
            np.copyto(out, values)  # the copy transposes; then the arithmetic runs over contiguous memory
            np.multiply(out, self._factor, out=out)
            if self._shifts:
                np.add(out, self._shift, out=out)
        else:
            wide = np.multiply(values, self._factor, dtype=np.float32)
            np.add(wide, self._shift, out=wide)
            np.copyto(out, wide, casting="same_kind")

    def _look_up(self, values: NDArray[np.uint8], out: NDArray[Any]) -> None:
        if self._tables == [bytes(range(256))]:
            out.view(np.uint8)[...] = values
            return
        if len(self._tables) == 1:
            out.reshape(-1).view(np.uint8)[:] = _translated(values, self._tables[0])
            return
        planes, results = np.moveaxis(values, self._axis, 0), np.moveaxis(out, self._axis, 0)
        for table, plane, result in zip(self._tables, planes, results, strict=True):
            result[...] = _translated(plane, table).view(out.dtype).reshape(plane.shape)


def _table(scale: float, mean: float, std: float, dtype: np.dtype[Any]) -> bytes:
    """Return the result for each of the 256 values, rounded half to even and clipped to the dtype."""
    exact = np.rint((np.arange(256, dtype=np.float64) * scale - mean) / std)
    limits = np.iinfo(dtype)
    return exact.clip(limits.min, limits.max).astype(dtype).tobytes()


def _translated(values: NDArray[np.uint8], table: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(values.tobytes().translate(table), np.uint8)
