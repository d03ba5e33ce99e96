"""The inputs and outputs of a model, and the conversion of an app's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgert.errors import RequestError
from edgert.protocol import wire
from edgert.protocol.arrays import FILE_STARTS
from edgert.tensors import DATATYPES, TensorSpec, fits

FRAME_OVERHEAD_BYTES = 4096  # header and descriptors

Inputs = ArrayLike | Mapping[str, ArrayLike]


class ModelInterface:
    """The description of `model` in a WELCOME."""

    def __init__(self, model: str, welcome: dict[str, Any]) -> None:
        self.model, self.release = model, int(welcome.get("release", 0))
        self.inputs = tuple(TensorSpec.from_json(v) for v in welcome.get("inputs", ()))
        self.outputs = tuple(str(v["name"]) for v in welcome.get("outputs", ()))
        self.frame_bytes_max = int(welcome.get("frame_bytes_max", wire.FRAME_BYTES_MAX))
        pre = welcome.get("preprocess") or {}
        # A model with preprocessing also takes frames or a signal, or files, for one of its inputs.
        self._forms = [TensorSpec.from_json(pre[key]) for key in ("input", "integers", "files") if key in pre]
        self._has_windows = bool(pre.get("step"))  # one signal may become several items

    def arrays(self, inputs: Inputs) -> tuple[list[NDArray[Any]], bool]:
        """Return C-contiguous arrays in the model's order, and whether a batch axis was added to them."""
        names = [spec.name for spec in self.inputs]
        if isinstance(inputs, Mapping):
            if set(inputs) != set(names):
                raise RequestError(f"model {self.model} takes inputs {names}, got {sorted(inputs)}")
            given = [_array(inputs[name]) for name in names]
        elif len(names) == 1:
            given = [_array(inputs)]
        else:
            raise RequestError(f"model {self.model} takes inputs {names}: give a dict by name")
        fitted = [self._fit(array, spec) for array, spec in zip(given, self.inputs, strict=True)]
        added = {was_added for _, was_added in fitted}
        if len(added) > 1 and not self._has_windows:
            raise RequestError("give the batch axis on every input, or on none")
        arrays = [array for array, _ in fitted]
        size = sum(array.nbytes for array in arrays)
        if size + FRAME_OVERHEAD_BYTES > self.frame_bytes_max:
            raise RequestError(
                f"the inputs take {size} bytes, a request at most {self.frame_bytes_max}: send less at once"
            )
        return arrays, added == {True}

    def _fit(self, array: NDArray[Any], spec: TensorSpec) -> tuple[NDArray[Any], bool]:
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        forms = [form for form in self._forms if form.name == spec.name]
        accepted = [*forms, spec] if self._has_windows else [spec, *forms]  # a signal first, as the worker takes it
        for wanted in accepted:
            # Python floats and NumPy's default are FP64, which stands for the model's FP32.
            if array.dtype == wanted.dtype or (array.dtype == np.float64 and wanted.datatype == "FP32"):
                shaped = np.ascontiguousarray(array, dtype=wanted.dtype)
                if fits(wanted, wanted.datatype, shaped.shape):
                    return shaped, False
                if fits(wanted, wanted.datatype, (1, *shaped.shape)):
                    return shaped[None], wanted is spec or not self._has_windows
        wants = " or ".join(f"{w.datatype} {list(w.shape)}" for w in accepted)
        got = DATATYPES.get(array.dtype.name, str(array.dtype))
        takes_files = any(w.datatype == "UINT8" and len(w.shape) == 2 for w in accepted)
        hint = "; to send files, build the model with --preprocess" if _is_file(array) and not takes_files else ""
        raise RequestError(
            f"input {spec.name!r} of model {self.model} takes {wants}, got {got} {list(array.shape)} (-1: any length){hint}"
        )


def _array(value: ArrayLike) -> NDArray[Any]:
    """Return `value` as an array. A file's bytes are UINT8 [bytes]; several files are rows, padded with zeros."""
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, list | tuple) and value and isinstance(value[0], bytes | bytearray | memoryview):
        files = [np.frombuffer(file, np.uint8) for file in value]
        padded = np.zeros((len(files), max(map(len, files))), np.uint8)
        for place, file in zip(padded, files, strict=True):
            place[: len(file)] = file
        return padded
    return np.asarray(value)


def _is_file(array: NDArray[Any]) -> bool:
    """Return whether these are the bytes of one or several JPEG, PNG or WAV files."""
    return array.dtype == np.uint8 and 1 <= array.ndim <= 2 and array.reshape(-1)[:8].tobytes().startswith(FILE_STARTS)
