"""The blocking client of the daemon's local socket.

A `Client` may be used by many threads: each request takes a connection of its own from a small pool and
gives it back, so threads never wait for each other here. Connections are made when needed, and made again
after the daemon restarted or moved a model to a new version.

Theory of operation of the hot path: an app asks again and again with arrays of one shape. So a connection
keeps, for the shape it saw last, the whole head of the request (header and descriptor) and writes only what
differs into it; and it keeps the arrays over its receive buffer for as long as answers look the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgert import wire
from edgert.arrays import from_wire, to_wire
from edgert.config import default_socket
from edgert.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    EdgeRTError,
    RequestError,
    Unavailable,
    WorkerLost,
)
from edgert.sharing import SHARE_BYTES_MIN, SharedArea, receive_with_descriptor
from edgert.tensors import DATATYPES, InferResponse, TensorSpec, fits

IDLE_CONNECTIONS_MAX = 32
RETRY_PAUSE_S = 0.05
SEND_BUFFER_BYTES = 1024**2  # a large frame then leaves in one system call
ARG_MAX = 2**32 - 1
TRANSPORTS = ("auto", "socket")

Inputs = ArrayLike | Mapping[str, ArrayLike]
Priority = Literal["normal", "high"]


class Client:
    """Asks the daemon at `path` (default: $EDGERT_SOCKET, else where this machine's daemon listens).

    `timeout_s` bounds every call, connecting and waiting for a restarting worker included. `transport`
    "auto" puts large tensors into memory shared with the daemon where both sides can; "socket" never does.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 30.0, transport: str = "auto"
    ) -> None:
        if transport not in TRANSPORTS:
            raise RequestError(f"transport {transport!r} is not known; give one of {', '.join(TRANSPORTS)}")
        self.path = Path(path) if path is not None else default_socket()
        self.timeout_s = timeout_s
        self.transport = transport
        # Lists are used as stacks: pop and append are atomic, so no lock is taken for a request.
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)
        self._closed = False

    @overload
    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: Literal[False] = False,
    ) -> dict[str, NDArray[Any]]: ...

    @overload
    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: Literal[True],
    ) -> InferResponse: ...

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: bool = False,
    ) -> dict[str, NDArray[Any]] | InferResponse:
        """Answer one batch: arrays by output name, each with the batch on axis 0.

        `inputs` is one array, for a model with one input, or arrays by input name. Give the batch axis, or
        leave it out of every input to ask for one item. Where the model has preprocessing, UINT8 arrays
        are taken as well, and where it decodes images, the bytes of a JPEG or PNG file, or a list of such
        (docs/processing.md). `priority` "high" goes before others that wait for the engine; `trace` gives what
        `request` gives. Raises RequestError (the inputs do not fit), Unavailable (try again), DeadlineExceeded.
        """
        flags = 0 if cache else wire.FLAG_NO_CACHE
        if priority != "normal":
            flags |= priority_flag(priority)
        how = _Connection.request if trace else _Connection.infer
        outputs: dict[str, NDArray[Any]] | InferResponse = self._call(model, inputs, timeout_s, flags, how)
        return outputs

    def request(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
    ) -> InferResponse:
        """As `infer`, with the release that answered, the stage times, the batch and whether the cache did."""
        return self.infer(model, inputs, timeout_s=timeout_s, cache=cache, priority=priority, trace=True)

    def models(self) -> list[dict[str, Any]]:
        """What the daemon serves: name, release and state of each model."""
        connection = _Connection(self.path, None, time.monotonic() + self.timeout_s, self.transport)
        connection.close()
        return list(connection.welcome["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """What the daemon says about `model`: release, inputs, outputs, labels."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                connection = self._connect(model, deadline)
            except Again as again:
                pause(again, deadline)
                continue
            self._give_back(connection)
            return dict(connection.welcome)

    def labels(self, model: str) -> list[str]:
        """The names of the model's classes by index, empty where its bundle has none. Ask once and keep them."""
        return [str(label) for label in self.metadata(model).get("labels", ())]

    def close(self) -> None:
        """Close the idle connections; a request under way in another thread ends first."""
        self._closed = True
        for connections in list(self._idle.values()):
            while connections:
                connections.pop().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, model: str, inputs: Inputs, timeout_s: float | None, flags: int, how: Any) -> Any:
        """Ask over an idle connection or a new one; again over another where no engine saw the request."""
        if timeout_s is None:
            timeout_s = self.timeout_s
        deadline = time.monotonic() + timeout_s
        idle = self._idle[model]
        while True:
            try:
                if idle:
                    connection = idle.pop()
                else:
                    connection = self._connect(model, deadline)
                    timeout_s = max(0.001, deadline - time.monotonic())
            except IndexError:  # another thread took the last one
                continue
            except Again as again:
                pause(again, deadline)
                continue
            try:
                answer = how(connection, inputs, timeout_s, deadline, flags)
            except Again as again:
                connection.close()
                pause(again, deadline)
                continue
            except EdgeRTError:
                if not connection.broken:
                    self._give_back(connection)
                raise
            except BaseException:  # a half-sent request must not be found by the next one
                connection.close()
                raise
            if self._closed or len(idle) >= IDLE_CONNECTIONS_MAX:
                connection.close()
            else:
                idle.append(connection)
            return answer

    def _connect(self, model: str, deadline: float) -> _Connection:
        if self._closed:
            raise RequestError("this client is closed; make a new one")
        try:
            return _Connection(self.path, model, deadline, self.transport)
        except Unavailable as error:
            if isinstance(error, DaemonUnreachable) or error.retry_after_s is None:
                raise
            raise Again(error) from error

    def _give_back(self, connection: _Connection) -> None:
        idle = self._idle[connection.model or ""]
        if self._closed or len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            idle.append(connection)


def priority_flag(priority: str) -> int:
    if priority != "high":
        raise RequestError(f"priority {priority!r} is not known; give normal or high")
    return wire.FLAG_HIGH_PRIORITY


class Again(Exception):
    """The request reached no engine; it may go over a new connection, after what `error` asks for."""

    def __init__(self, error: Unavailable | None = None) -> None:
        super().__init__()
        self.error = error


def pause(again: Again, deadline: float) -> None:
    """Wait as long as the daemon asked for, or raise its error when that is past the deadline."""
    wait_s = again_wait_s(again, deadline)
    if wait_s:
        time.sleep(wait_s)


def again_wait_s(again: Again, deadline: float) -> float:
    """How long to wait before asking again (0: not at all). Raises what `again` holds when it is too late."""
    if again.error is None:  # the connection had moved: the next one is ready now
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("the time-out passed while the model moved to another worker; send it again")
        return 0.0
    wait_s = again.error.retry_after_s or RETRY_PAUSE_S
    if time.monotonic() + wait_s >= deadline:
        raise again.error
    return wait_s


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

    def response(self, received: wire.Frame, outputs: dict[str, NDArray[Any]]) -> InferResponse:
        return InferResponse(
            model=self.model,
            release=int(self.welcome["release"]),
            outputs=outputs,
            stages=wire.stage_times(received),
            batch=received.arg,
            cache_hit=bool(received.flags & wire.FLAG_CACHE_HIT),
        )

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
        raise RequestError(
            f"input {spec.name!r} of model {self.model} takes {wants}, got {got} {list(array.shape)} (-1: any length)"
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


def welcome_of(received: wire.Frame | None) -> dict[str, Any]:
    """The content of a WELCOME. Raises the daemon's error, or Unavailable where the worker just went away."""
    if received is None or received.kind == wire.MOVED:
        raise Unavailable("the daemon is restarting this model", retry_after_s=RETRY_PAUSE_S)
    if received.kind == wire.ERROR:
        raise wire.error_of(received)
    if received.kind != wire.WELCOME:
        raise EdgeRTError(f"the daemon answered a hello with frame {received.kind}")
    return received.json()


class _Template(NamedTuple):
    """All of a request that its shape decides. Unpadded parts are sent in this order: head, the array, pad.

    `shared` is the place in shared memory for the array; then `head` is the header alone.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    added_axis: bool
    head: bytearray
    pad: bytes
    total_bytes: int
    shared: NDArray[Any] | None


# flags, request id, model id, arg: what differs from request to request, at offset 6 of the header
_VARYING = struct.Struct("<HQII")
_VARYING_OFFSET = 6


class _Connection:
    """One connection, bound by its hello to one model (None: to the daemon itself)."""

    def __init__(self, path: Path, model: str | None, deadline: float, transport: str) -> None:
        self.model = model
        self.broken = False
        self._frames = wire.FrameBuffer()
        self._request_id = 0
        self._timeout_s = 0.0
        self._template: _Template | None = None
        self._area: SharedArea | None = None
        self._tensors: tuple[wire.WireTensor, ...] = ()
        self._views: list[tuple[str, NDArray[Any]]] = []
        self._sock = dial(path, deadline)
        self._recv_into = self._sock.recv_into
        try:
            received = self._greet(model, transport, deadline)
            self.welcome = welcome_of(received)
        except OSError as error:
            self.close()
            raise DaemonUnreachable(f"the daemon at {path} closed the connection: {error}") from error
        except BaseException:
            self.close()
            raise
        assert received is not None  # welcome_of has said otherwise
        self._model_id = received.model_id
        self._interface = ModelInterface(model or "", self.welcome)
        self._frames.limit(self._interface.frame_bytes_max)

    def infer(self, inputs: Inputs, timeout_s: float, deadline: float, flags: int) -> dict[str, NDArray[Any]]:
        _, outputs = self._exchange(inputs, timeout_s, deadline, flags)
        return outputs

    def request(self, inputs: Inputs, timeout_s: float, deadline: float, flags: int) -> InferResponse:
        received, outputs = self._exchange(inputs, timeout_s, deadline, flags)
        return self._interface.response(received, outputs)

    def close(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            self._sock.close()

    def _exchange(
        self, inputs: Inputs, timeout_s: float, deadline: float, flags: int
    ) -> tuple[wire.Frame, dict[str, NDArray[Any]]]:
        """Send one request and receive its answer: the frame, and copies of its tensors by name."""
        template = self._template
        if (
            template is not None
            and type(inputs) is np.ndarray
            and inputs.shape == template.shape
            and inputs.dtype is template.dtype
            and inputs.flags.c_contiguous
        ):
            parts = self._fill(template, inputs, timeout_s, flags)
            added_axis, total = template.added_axis, template.total_bytes
        else:
            parts, added_axis = self._compose(inputs, timeout_s, flags)
            total = sum(map(len, parts))
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        try:
            sent = self._sock.sendmsg(parts)
            if sent != total:  # a signal came in between, or the daemon takes nothing
                self._sock.sendall(b"".join(parts)[sent:])
        except BlockingIOError as error:
            self.close()
            raise DeadlineExceeded("the daemon did not take the request in time; it may be overloaded") from error
        except OSError as error:
            raise self._refused() from error
        received = self._answer(deadline)
        if received.tensors is not self._tensors:
            self._tensors = received.tensors
            names = self._interface.outputs
            self._views = [(names[tensor.number], from_wire(tensor)) for tensor in received.tensors]
        if added_axis:
            return received, {name: view[0].copy() for name, view in self._views}
        return received, {name: view.copy() for name, view in self._views}

    def _fill(self, template: _Template, array: NDArray[Any], timeout_s: float, flags: int) -> Sequence[Any]:
        """The parts of a request like the last one: only what differs is written."""
        self._request_id += 1
        timeout_us = min(int(timeout_s * 1e6) + 1, ARG_MAX)
        if template.shared is not None:
            np.copyto(template.shared, array)
            flags |= wire.FLAG_SHARED
            _VARYING.pack_into(template.head, _VARYING_OFFSET, flags, self._request_id, self._model_id, timeout_us)
            return (template.head,)
        _VARYING.pack_into(template.head, _VARYING_OFFSET, flags, self._request_id, self._model_id, timeout_us)
        return (template.head, array, template.pad) if template.pad else (template.head, array)

    def _compose(self, inputs: Inputs, timeout_s: float, flags: int) -> tuple[Sequence[wire.Buffer], bool]:
        """The parts of any request; where it has one input, a template for the next like it is kept."""
        arrays, added_axis = self._interface.arrays(inputs)
        tensors = [to_wire(i, array) for i, array in enumerate(arrays)]
        self._request_id += 1
        parts = wire.frame(
            wire.INFER,
            request_id=self._request_id,
            model_id=self._model_id,
            flags=flags,
            arg=min(int(timeout_s * 1e6) + 1, ARG_MAX),
            tensors=tensors,
        )
        self._template = self._template_of(inputs, arrays, parts, added_axis)
        if self._worth_sharing(parts):
            assert self._area is not None
            header = wire.share(parts, self._area.request)
            if header is not None:
                return [header], added_axis
        return parts, added_axis

    def _worth_sharing(self, parts: Sequence[wire.Buffer]) -> bool:
        return self._area is not None and sum(map(len, parts)) >= SHARE_BYTES_MIN

    def _template_of(
        self, inputs: Inputs, arrays: list[NDArray[Any]], parts: Sequence[wire.Buffer], added_axis: bool
    ) -> _Template | None:
        if len(arrays) != 1 or type(inputs) is not np.ndarray or inputs.dtype != arrays[0].dtype or not inputs.nbytes:
            return None
        total = sum(map(len, parts))
        shape, dtype = inputs.shape, inputs.dtype
        if self._area is not None and SHARE_BYTES_MIN <= total <= len(self._area.request):
            place = np.frombuffer(self._area.request, dtype, count=inputs.size, offset=128).reshape(shape)
            return _Template(shape, dtype, added_axis, bytearray(parts[0]), b"", 64, place)
        head = bytearray(parts[0] + parts[1])  # type: ignore[operator]  # both are bytes
        return _Template(shape, dtype, added_axis, head, bytes(-inputs.nbytes % 64), total, None)

    def _answer(self, deadline: float) -> wire.Frame:
        """The RESULT of the request just sent. Raises the daemon's error, WorkerLost, or Again where it moved."""
        try:
            received = self._receive(deadline)
        except OSError as error:
            self.close()
            raise WorkerLost(f"the daemon dropped the connection during the request: {error}; send it again") from error
        if received is None:
            self.close()
            raise WorkerLost("the model's worker ended during the request; send it again")
        if received.kind == wire.RESULT and received.request_id == self._request_id:
            return received
        if received.kind == wire.ERROR and received.request_id in (0, self._request_id):
            said = wire.error_of(received)
            if received.request_id == 0:  # it concerns the connection, which ends now
                self.close()
                if said.retryable:  # no engine saw the request: a new connection may find a daemon that serves
                    raise Again from said
            raise said
        self.close()
        if received.kind == wire.MOVED:
            raise Again
        raise EdgeRTError(f"the daemon answered with frame {received.kind} for request {received.request_id}")

    def _receive(self, deadline: float) -> wire.Frame | None:
        """The next frame, or None at the end of the connection."""
        frames = self._frames
        while True:
            try:
                count = self._recv_into(frames.room)
            except BlockingIOError as error:
                self.close()
                raise DeadlineExceeded(
                    "no answer came in time; give a longer timeout_s or look at edgertd status"
                ) from error
            if not count:
                return None
            received = frames.feed(count)
            if received is not None:
                return received
            self._set_timeout(max(0.001, deadline - time.monotonic()))

    def _refused(self) -> Exception:
        """Why the daemon closed before it had the whole request: its own words, else it had moved or restarted."""
        try:
            received = self._receive(time.monotonic() + RETRY_PAUSE_S)
        except (OSError, EdgeRTError):
            received = None
        self.close()
        if received is not None and received.kind == wire.ERROR:
            error = wire.error_of(received)
            if not error.retryable:
                return error
        return Again()  # no engine saw the request

    def _greet(self, model: str | None, transport: str, deadline: float) -> wire.Frame | None:
        """Say hello and receive the WELCOME, with the shared memory that may come along."""
        self._set_timeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        hello = {"model": model, "shared": True} if transport == "auto" and model is not None else {"model": model}
        self._sock.sendall(wire.json_frame(wire.HELLO, hello))
        try:
            count, descriptor = receive_with_descriptor(self._sock, self._frames.room)
        except BlockingIOError as error:
            raise DeadlineExceeded("the daemon did not answer the hello in time") from error
        if descriptor is not None:
            self._area = SharedArea.opened(descriptor)
        received = self._frames.feed(count) if count else None
        if received is None and count:
            received = self._receive(deadline)
        if self._area is not None:
            self._frames.shared = self._area.response
        return received

    def _set_timeout(self, timeout_s: float) -> None:
        """Let the kernel bound each send and receive: cheaper than a poll before every call."""
        self._timeout_s = timeout_s
        value = timeval(timeout_s)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def timeval(seconds: float) -> bytes:
    """A time-out for SO_RCVTIMEO and SO_SNDTIMEO; at least a millisecond, as 0 would mean for ever."""
    microseconds = max(1000, int(seconds * 1e6))
    return struct.pack("ll", microseconds // 1_000_000, microseconds % 1_000_000)


def send_all(sock: socket.socket, parts: Sequence[wire.Buffer]) -> None:
    """Send every byte of `parts`, in as few system calls as the kernel takes."""
    total = sum(map(len, parts))
    sent = sock.sendmsg(parts)
    if sent == total:
        return
    rest = memoryview(b"".join(parts))[sent:]
    sock.sendall(rest)


def dial(path: Path, deadline: float, *, wait: bool = True) -> socket.socket:
    """A connected socket. Where the daemon's queue is full it waits until `deadline`, or, without `wait`, fails at
    once with a BlockingIOError as the cause. Raises DaemonUnreachable.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The kernel's own time-out: a socket that Python times would fail at once where the backlog is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(deadline - time.monotonic()))
        sock.setblocking(wait)
        sock.connect(os.fspath(path))
        sock.setblocking(True)
        return sock
    except FileNotFoundError as error:
        sock.close()
        raise DaemonUnreachable(
            f"no daemon listens at {path}: start it with edgertd start, or give its path"
        ) from error
    except PermissionError as error:
        sock.close()
        raise DaemonUnreachable(f"no permission for {path}: run as its owner or a member of its group") from error
    except OSError as error:
        sock.close()
        raise DaemonUnreachable(f"cannot connect to the daemon at {path}: {error}") from error
