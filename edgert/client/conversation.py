"""What a client and the daemon say to each other about one model, without a socket: both clients' common part.

Theory of operation: an app asks again and again with arrays of one shape, and answers look alike too. So the frame
of the last request is kept, and of the next one only what differs is written into it; and the arrays over the
receive buffer are kept for as long as answers look the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgert.errors import EdgeRTError, RequestError, Unavailable
from edgert.protocol import wire
from edgert.protocol.arrays import IMAGE_STARTS, from_wire, looks_of, places, to_wire
from edgert.protocol.sharing import SHARE_BYTES_MIN, SharedArea
from edgert.tensors import DATATYPES, InferResponse, TensorSpec, fits

KEPT_BYTES_MAX = 16 * 1024  # up to here copying the arrays is cheaper than more buffers in the system call
ARG_MAX = 2**32 - 1
RETRY_PAUSE_S = 0.05

Inputs = ArrayLike | Mapping[str, ArrayLike]


class Conversation:
    """The requests and answers of one connection to a model, one after the other.

    `area` is the memory shared with the daemon, where there is some. After `ask`, `request_id` is that of the
    request and `size_bytes` how much is to be sent.
    """

    def __init__(self, interface: ModelInterface, model_id: int, area: SharedArea | None = None) -> None:
        self.interface, self._model_id, self._area = interface, model_id, area
        self.request_id = self.size_bytes = 0
        # Of the last request, for the next one like it: shapes and dtypes that make it one, where its arrays go,
        # and what is sent then. Without places the arrays themselves are sent after the head.
        self._looks: tuple[Any, ...] = ()
        self._places: list[NDArray[Any]] = []
        self._head = bytearray()
        self._flags = 0
        self._added_axis = False
        # Of the last answer: arrays over the receive buffer.
        self._tensors: tuple[wire.WireTensor, ...] = ()
        self._views: list[tuple[str, NDArray[Any]]] = []

    def ask(self, inputs: Inputs, flags: int, timeout_us: int) -> Sequence[wire.Buffer]:
        """The buffers of an INFER frame, to be sent before the next call. Raises RequestError.

        The arrays are sent from where they lie, where they are too long to be copied.
        """
        self.request_id = request_id = self.request_id + 1
        given: tuple[NDArray[Any], ...] = (inputs,) if type(inputs) is np.ndarray else self._by_name(inputs)
        if not given or looks_of(given) != self._looks:
            return self._compose(inputs, given, flags, timeout_us)
        head = self._head
        wire.VARYING.pack_into(head, wire.VARYING_OFFSET, flags | self._flags, request_id, self._model_id, timeout_us)
        if not self._places:
            return self._long(given)
        for place, array in zip(self._places, given):  # noqa: B905  # as many as there are looks
            place[...] = array
        return (head,)

    def outputs(self, received: wire.Frame) -> dict[str, NDArray[Any]]:
        """Copies of the tensors of the answer to the last request, by name."""
        if received.tensors is not self._tensors:
            self._look_at(received.tensors)
        return {name: view.copy() for name, view in self._views}

    def response(self, received: wire.Frame, outputs: dict[str, NDArray[Any]]) -> InferResponse:
        """`outputs` with what the frame says of how they came about."""
        return InferResponse(
            model=self.interface.model,
            release=int(self.interface.welcome["release"]),
            outputs=outputs,
            stages=wire.stage_times(received),
            batch=received.arg,
            cache_hit=bool(received.flags & wire.FLAG_CACHE_HIT),
        )

    def _by_name(self, inputs: Inputs) -> tuple[NDArray[Any], ...]:
        """Arrays given by name in the model's order; none where they are not all arrays of the model's names."""
        if type(inputs) is not dict or len(inputs) != len(self.interface.inputs):
            return ()
        given: tuple[Any, ...] = tuple(inputs.get(spec.name) for spec in self.interface.inputs)
        return given if all(type(array) is np.ndarray for array in given) else ()

    def _compose(
        self, inputs: Inputs, given: tuple[NDArray[Any], ...], flags: int, timeout_us: int
    ) -> Sequence[wire.Buffer]:
        """The buffers of any request. `given` are its arrays as they were given, if they were arrays."""
        self._looks = ()
        arrays, self._added_axis = self.interface.arrays(inputs)
        self._tensors = ()  # the axis may be another's
        parts: Sequence[wire.Buffer] = wire.frame(
            wire.INFER,
            request_id=self.request_id,
            model_id=self._model_id,
            flags=flags,
            arg=timeout_us,
            tensors=[to_wire(i, array) for i, array in enumerate(arrays)],
        )
        size = sum(map(len, parts))
        header = None
        if self._area is not None and size >= SHARE_BYTES_MIN:
            header = wire.share(parts, self._area.request)
        self.size_bytes = size if header is None else len(header)
        if [array.dtype for array in given] == [array.dtype for array in arrays]:  # nothing was converted
            self._looks = looks_of(given)
            self._keep(given, parts, header)
        return parts if header is None else [header]

    def _keep(self, given: Sequence[NDArray[Any]], parts: Sequence[wire.Buffer], header: bytes | None) -> None:
        """Keep what the next request like this one can use."""
        self._flags, self._places = 0, []
        if header is not None:
            assert self._area is not None  # the header says that the arrays lie there
            self._head, self._flags = bytearray(header), wire.FLAG_SHARED
            self._places = places(given, self._area.request)
        elif self.size_bytes <= KEPT_BYTES_MAX:
            self._head = bytearray(b"".join(parts))
            self._places = places(given, self._head)
        else:
            self._head = bytearray(b"".join(parts[:2]))  # header and descriptors

    def _long(self, given: Sequence[NDArray[Any]]) -> list[wire.Buffer]:
        """The head and the arrays from where they lie."""
        parts: list[wire.Buffer] = [self._head]
        for array in given:
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if array.nbytes & 63:
                parts.append(bytes(-array.nbytes % 64))
        return parts

    def _look_at(self, tensors: tuple[wire.WireTensor, ...]) -> None:
        names = self.interface.outputs
        if any(tensor.number >= len(names) for tensor in tensors):
            raise EdgeRTError("the daemon answered with an output that the model does not have")
        views = [(names[tensor.number], from_wire(tensor)) for tensor in tensors]
        self._views = [(name, view[0, ...]) for name, view in views] if self._added_axis else views
        self._tensors = tensors


def arg_of(timeout_s: float) -> int:
    """A time-out as an INFER frame's `arg`: microseconds, at least one."""
    return min(int(min(ARG_MAX, timeout_s * 1e6)) + 1, ARG_MAX)


class ModelInterface:
    """What a WELCOME says of a model, and how inputs and answers are fitted to it. Both clients use it."""

    def __init__(self, model: str, welcome: dict[str, Any]) -> None:
        self.model, self.welcome = model, welcome
        self.inputs = tuple(TensorSpec.from_json(v) for v in welcome.get("inputs", ()))
        self.outputs = tuple(str(v["name"]) for v in welcome.get("outputs", ()))
        self.frame_bytes_max = int(welcome.get("frame_bytes_max", wire.FRAME_BYTES_MAX))
        pre = welcome.get("preprocess")
        # What may be given instead of a model's tensor: UINT8 values, and image files.
        self._forms = [] if pre is None else [TensorSpec.from_json(pre[k]) for k in ("input", "files") if k in pre]

    def arrays(self, inputs: Inputs) -> tuple[list[NDArray[Any]], bool]:
        """C-contiguous arrays in the model's order, and whether the batch axis was added to them."""
        if isinstance(inputs, Mapping):
            names = [spec.name for spec in self.inputs]
            if set(inputs) != set(names):
                raise RequestError(f"model {self.model} takes inputs {names}, got {sorted(inputs)}")
            given = [_array(inputs[name]) for name in names]
        elif len(self.inputs) == 1:
            given = [_array(inputs)]
        else:
            raise RequestError(f"model {self.model} takes inputs {[s.name for s in self.inputs]}: give a dict by name")
        fitted = [self._fit(array, spec) for array, spec in zip(given, self.inputs, strict=True)]
        added = {was_added for _, was_added in fitted}
        if len(added) > 1:
            raise RequestError("give the batch axis on every input, or on none")
        arrays = [array for array, _ in fitted]
        size = sum(array.nbytes for array in arrays)
        if size + 4096 > self.frame_bytes_max:
            raise RequestError(
                f"the inputs take {size} bytes, a request at most {self.frame_bytes_max}: send less at once"
            )
        return arrays, added == {True}

    def _fit(self, array: NDArray[Any], spec: TensorSpec) -> tuple[NDArray[Any], bool]:
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        accepted = [spec, *(form for form in self._forms if form.name == spec.name)]
        for wanted in accepted:
            if array.dtype == wanted.dtype or (array.dtype == np.float64 and wanted.datatype == "FP32"):
                # Python floats and NumPy's default are FP64: what was meant is the model's FP32.
                shaped = np.ascontiguousarray(array, dtype=wanted.dtype)
                if fits(wanted, wanted.datatype, shaped.shape):
                    return shaped, False
                if fits(wanted, wanted.datatype, (1, *shaped.shape)):
                    return shaped[None], True
        wants = " or ".join(f"{w.datatype} {list(w.shape)}" for w in accepted)
        got = DATATYPES.get(array.dtype.name, str(array.dtype))
        files = not any(w.datatype == "UINT8" and len(w.shape) == 2 for w in accepted)
        hint = "; image files only where it was built with --preprocess" if files and _is_image(array) else ""
        raise RequestError(
            f"input {spec.name!r} of model {self.model} takes {wants}, got {got} {list(array.shape)} (-1: any length){hint}"
        )


def _array(value: ArrayLike) -> NDArray[Any]:
    """An array of what was given. A file's bytes are UINT8 [bytes]; of several files each is a row, filled with zeros."""
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, list | tuple) and value and isinstance(value[0], bytes | bytearray | memoryview):
        rows = [np.frombuffer(file, np.uint8) for file in value]
        files = np.zeros((len(rows), max(map(len, rows))), np.uint8)
        for row, file in zip(files, rows, strict=True):
            row[: len(file)] = file
        return files
    return np.asarray(value)


def _is_image(array: NDArray[Any]) -> bool:
    """Whether these are the bytes of a JPEG or PNG file, or of several."""
    return array.dtype == np.uint8 and 1 <= array.ndim <= 2 and array.reshape(-1)[:8].tobytes().startswith(IMAGE_STARTS)


def welcome_of(received: wire.Frame | None) -> dict[str, Any]:
    """The content of a WELCOME. Raises the daemon's error, or Unavailable where the worker just went away."""
    if received is None or received.kind == wire.MOVED:
        raise Unavailable("the daemon is restarting this model", retry_after_s=RETRY_PAUSE_S)
    if received.kind == wire.ERROR:
        raise wire.error_of(received)
    if received.kind != wire.WELCOME:
        raise EdgeRTError(f"the daemon answered a hello with frame {received.kind}")
    return received.json()
