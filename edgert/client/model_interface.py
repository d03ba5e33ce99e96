"""The inputs and outputs of a model, and the conversion of an app's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgert.errors import RequestError
from edgert.printable import counted
from edgert.protocol import wire
from edgert.tensors import DATATYPES, TensorSpec, byte_rows, fits

FRAME_OVERHEAD_BYTES = 4096  # header and descriptors

Inputs = ArrayLike | Mapping[str, ArrayLike]


class ModelInterface:
    """The description of `model` in a WELCOME."""

    def __init__(self, model: str, welcome: dict[str, Any]) -> None:
        self.model = model
        self.release = int(welcome.get("release", 0))
        self.inputs = tuple(TensorSpec.from_json(v) for v in welcome.get("inputs", ()))
        self.outputs = tuple(str(v["name"]) for v in welcome.get("outputs", ()))
        self.frame_bytes_max = int(welcome.get("frame_bytes_max", wire.FRAME_BYTES_MAX))
        pre = welcome.get("preprocess") or {}
        # A model with preprocessing also accepts frames, a signal, text or files for one of its inputs.
        self._forms = [TensorSpec.from_json(pre[key]) for key in ("input", "integers", "files", "text") if key in pre]
        # A text replaces all inputs that are computed from it.
        from_text = [name for name in pre.get("text_for", ()) if name != self._forms[0].name]
        self._with_text = tuple(spec for spec in self.inputs if spec.name not in from_text) if from_text else ()
        self._numbers = tuple(range(len(self.inputs)))
        self._numbers_with_text = tuple(self.inputs.index(spec) for spec in self._with_text)
        self._has_windows = bool(pre.get("step"))  # one signal may become several items

    def arrays(self, inputs: Inputs) -> tuple[list[NDArray[Any]], bool]:
        """Return C-contiguous arrays in the model's order, and whether this method added a batch axis."""
        names, names_with_text = ([spec.name for spec in specs] for specs in (self.inputs, self._with_text))
        specs = self.inputs
        if isinstance(inputs, Mapping):
            if names_with_text and set(inputs) == set(names_with_text):
                specs = self._with_text
            elif set(inputs) != set(names):
                also = f", or {names_with_text} with text as {self._forms[0].name!r}" if names_with_text else ""
                raise RequestError(
                    f"model {self.model} takes inputs {names}{also}, got {sorted(map(str, inputs))}: send these names and no others"
                )
            given = [_array(inputs[spec.name]) for spec in specs]
        elif 1 in (len(names), len(names_with_text)):
            specs = specs if len(names) == 1 else self._with_text
            given = [_array(inputs)]
        else:
            raise RequestError(
                f"model {self.model} takes inputs {names}, got one array: give a dict of arrays by these names"
            )
        fitted = [self._fit(array, spec) for array, spec in zip(given, specs, strict=True)]
        added = {was_added for _, was_added in fitted}
        if len(added) > 1 and not self._has_windows:
            raise RequestError("give the batch axis on every input, or on none")
        arrays = [array for array, _ in fitted]
        size = sum(array.nbytes for array in arrays)
        if size + FRAME_OVERHEAD_BYTES > self.frame_bytes_max:
            raise RequestError(
                f"the inputs have {size} bytes; a request may have {self.frame_bytes_max}: send fewer items at once, or raise "
                "frame_mb in [serving] on the device"
            )
        return arrays, added == {True}

    def numbers(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the inputs in a request of `count` arrays."""
        return self._numbers if count == len(self._numbers) else self._numbers_with_text

    def _fit(self, array: NDArray[Any], spec: TensorSpec) -> tuple[NDArray[Any], bool]:
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        forms = [form for form in self._forms if form.name == spec.name]
        accepted = [*forms, spec] if self._has_windows else [spec, *forms]  # a signal first, like the worker
        for wanted in accepted:
            # Python floats and NumPy's default are FP64; convert them to a model's FP32.
            if array.dtype == wanted.dtype or (array.dtype == np.float64 and wanted.datatype == "FP32"):
                shaped = np.ascontiguousarray(array, dtype=wanted.dtype)
                if fits(wanted, wanted.datatype, shaped.shape):
                    return shaped, False
                if fits(wanted, wanted.datatype, (1, *shaped.shape)):
                    return shaped[None], wanted is spec or not self._has_windows
        wants = " or ".join(f"{w.datatype} {list(w.shape)}" for w in accepted)
        got = DATATYPES.get(array.dtype.name, str(array.dtype))
        hint = _hint_for_bytes(array, accepted) if array.dtype == np.uint8 else ""
        legend = " (-1: any length)" if any(-1 in w.shape for w in accepted) else ""
        if spec.shape[0] > 0 and array.shape[1:] == spec.shape[1:]:
            hint = f"; send {counted(spec.shape[0], 'item')} a request"
        raise RequestError(
            f"input {spec.name!r} of model {self.model} takes {wants}, got {got} {list(array.shape)}{legend}{hint}"
        )


def _hint_for_bytes(array: NDArray[Any], accepted: list[TensorSpec]) -> str:
    """Return advice for a refused file, text or frame; "" for no advice."""
    frames = [spec for spec in accepted if spec.datatype == "UINT8" and len(spec.shape) == 4]
    if frames and array.ndim > 2:
        return "; frames of another size or order of axes need [resize] and `layout` in the build's --preprocess file"
    if frames and array.ndim == 2:
        channels = {1: "frame[None]", 3: "frame[..., None]"}
        gray = [form for axis, form in channels.items() if frames[0].shape[axis] == 1]
        return f"; a gray frame needs its axis of channels: {gray[0]}" if gray else "; a frame has an axis of channels"
    takes_files = any(spec.datatype == "UINT8" and len(spec.shape) == 2 for spec in accepted)
    if array.ndim > 2 or takes_files:
        return ""
    if frames:
        return "; to send image files, build the model with decode = true in its --preprocess"
    return "; to send files or text, build the model with --preprocess"


def _array(value: ArrayLike) -> NDArray[Any]:
    """Return `value` as an array: a file or text as UINT8, several files or texts as rows padded with 0."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, bytes | str):
        return np.frombuffer(_bytes(value), np.uint8)
    if isinstance(value, list | tuple) and value and isinstance(value[0], bytes | bytearray | memoryview | str):
        return byte_rows([_bytes(item) for item in value])
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:  # rows of different lengths; a tensor of a GPU
        why = str(error).rstrip(".")
        raise RequestError(f"the input is not an array: {why}; give values of one shape and dtype") from error
    if array.dtype.hasobject and not array.ndim:  # for example, a path or an open file
        raise RequestError(f"the input is a {type(value).__name__}, not an array: give numbers, or the bytes of a file")
    return array


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        return bytes(value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}; send text that UTF-8 can encode"
        ) from error
