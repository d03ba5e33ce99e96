"""The blocking client of the daemon's local socket.

A `Client` may be used by many threads: each request takes a connection of its own from a small pool and
gives it back, so threads never wait for each other here. Connections are made when needed, and made again
after the daemon restarted or moved a model to a new version.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgert import wire
from edgert.arrays import from_wire, to_wire
from edgert.config import default_socket
from edgert.errors import DaemonUnreachable, DeadlineExceeded, EdgeRTError, RequestError, Unavailable, WorkerLost
from edgert.tensors import DATATYPES, InferResponse, TensorSpec, fits
from edgert.wire import FrameBuffer

IDLE_CONNECTIONS_MAX = 32
RETRY_PAUSE_S = 0.05
_ARG_MAX = 2**32 - 1


class Client:
    """Asks the daemon at `path` (default: $EDGERT_SOCKET, else where this machine's daemon listens).

    `timeout_s` bounds every call, connecting and waiting for a restarting worker included.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 30.0) -> None:
        self.path = Path(path) if path is not None else default_socket()
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}
        self._closed = False

    def infer(
        self,
        model: str,
        inputs: ArrayLike | Mapping[str, ArrayLike],
        *,
        timeout_s: float | None = None,
        cache: bool = True,
    ) -> dict[str, NDArray[Any]]:
        """Answer one batch: arrays by output name, each with the batch on axis 0.

        `inputs` is one array, for a model with one input, or arrays by input name. Give the batch axis, or
        leave it out of every input to ask for one item. Where the model has preprocessing, UINT8 arrays
        are taken as well. Raises RequestError (the inputs do not fit), Unavailable (try again), DeadlineExceeded.
        """
        return self.request(model, inputs, timeout_s=timeout_s, cache=cache).outputs

    def request(
        self,
        model: str,
        inputs: ArrayLike | Mapping[str, ArrayLike],
        *,
        timeout_s: float | None = None,
        cache: bool = True,
    ) -> InferResponse:
        """As `infer`, with the release that answered, the stage times, the batch and whether the cache did."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                connection = self._take(model, deadline)
                return self._ask(connection, inputs, deadline, cache)
            except _Again as again:
                self._pause(again, deadline)

    def models(self) -> list[dict[str, Any]]:
        """What the daemon serves: name, release and state of each model."""
        connection = _Connection(self.path, None, time.monotonic() + self.timeout_s)
        connection.close()
        return list(connection.welcome["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """What the daemon says about `model`: release, inputs, outputs, labels."""
        connection = self._take(model, time.monotonic() + self.timeout_s)
        self._give_back(connection)
        return dict(connection.welcome)

    def close(self) -> None:
        """Close the idle connections; a request under way in another thread ends first."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self,
        connection: _Connection,
        inputs: ArrayLike | Mapping[str, ArrayLike],
        deadline: float,
        cache: bool,
    ) -> InferResponse:
        try:
            response = connection.infer(inputs, deadline, cache)
        except EdgeRTError as error:
            if isinstance(error, WorkerLost) or connection.broken:
                connection.close()
            else:
                self._give_back(connection)
            raise
        except BaseException:  # a half-sent request must not be found by the next one
            connection.close()
            raise
        self._give_back(connection)
        return response

    def _take(self, model: str, deadline: float) -> _Connection:
        with self._lock:
            if self._closed:
                raise RequestError("this client is closed; make a new one")
            idle = self._idle.get(model)
            if idle:
                return idle.pop()
        try:
            return _Connection(self.path, model, deadline)
        except Unavailable as error:
            if isinstance(error, DaemonUnreachable) or error.retry_after_s is None:
                raise
            raise _Again(error) from error

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(connection.model or "", [])
            if not self._closed and len(idle) < IDLE_CONNECTIONS_MAX:
                idle.append(connection)
                return
        connection.close()

    def _pause(self, again: _Again, deadline: float) -> None:
        """Wait as long as the daemon asked for, or raise its error when that is past the deadline."""
        if again.error is None:  # the connection had moved: the next one is ready now
            return
        wait_s = again.error.retry_after_s or RETRY_PAUSE_S
        if time.monotonic() + wait_s >= deadline:
            raise again.error
        time.sleep(wait_s)


class _Again(Exception):
    """The request reached no engine; it may go over a new connection, after what `error` asks for."""

    def __init__(self, error: Unavailable | None = None) -> None:
        super().__init__()
        self.error = error


class _Connection:
    """One connection, bound by its hello to one model (None: to the daemon itself)."""

    def __init__(self, path: Path, model: str | None, deadline: float) -> None:
        self.model = model
        self.broken = False
        self._frames = FrameBuffer()
        self._request_id = 0
        self._timeout_ms = 0
        self._sock = _connect(path, deadline)
        try:
            self._sock.sendall(wire.json_frame(wire.HELLO, {"model": model}))
            received = self._receive(deadline)
        except OSError as error:
            self.close()
            raise DaemonUnreachable(f"the daemon at {path} closed the connection: {error}") from error
        except BaseException:
            self.close()
            raise
        if received is None or received.kind == wire.MOVED:
            self.close()
            raise Unavailable("the daemon is restarting this model", retry_after_s=RETRY_PAUSE_S)
        if received.kind == wire.ERROR:
            self.close()
            raise wire.error_of(received)
        self.welcome = received.json()
        self.inputs = tuple(TensorSpec.from_json(v) for v in self.welcome.get("inputs", ()))
        self.outputs = tuple(str(v["name"]) for v in self.welcome.get("outputs", ()))
        self._model_id = received.model_id
        pre = self.welcome.get("preprocess")
        self._byte_input = None if pre is None else TensorSpec.from_json(pre["input"])

    def infer(self, inputs: ArrayLike | Mapping[str, ArrayLike], deadline: float, cache: bool) -> InferResponse:
        arrays, added_axis = self._arrays(inputs)
        self._request_id += 1
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the time-out had passed before the request was sent; give a longer timeout_s")
        parts = wire.frame(
            wire.INFER,
            request_id=self._request_id,
            model_id=self._model_id,
            flags=0 if cache else wire.FLAG_NO_CACHE,
            arg=min(int(left_s * 1e6) + 1, _ARG_MAX),
            tensors=[to_wire(i, array) for i, array in enumerate(arrays)],
        )
        try:
            self._send(parts, deadline)
        except OSError as error:
            raise self._refused() from error
        received = self._answer(deadline)
        if received.kind == wire.ERROR:
            raise wire.error_of(received)
        return self._response(received, added_axis)

    def _refused(self) -> Exception:
        """Why the daemon closed before it had the whole request: its own words, else it had moved or restarted."""
        try:
            received = self._receive(time.monotonic() + RETRY_PAUSE_S)
        except (OSError, EdgeRTError):
            received = None
        self.close()
        if received is not None and received.kind == wire.ERROR:
            return wire.error_of(received)
        return _Again()  # no engine saw the request

    def close(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            self._sock.close()

    def _arrays(self, inputs: ArrayLike | Mapping[str, ArrayLike]) -> tuple[list[NDArray[Any]], bool]:
        """C-contiguous arrays in the model's order, and whether the batch axis was added to them."""
        if isinstance(inputs, Mapping):
            names = [spec.name for spec in self.inputs]
            if set(inputs) != set(names):
                raise RequestError(f"model {self.model} takes inputs {names}, got {sorted(inputs)}")
            given = [np.asarray(inputs[name]) for name in names]
        elif len(self.inputs) == 1:
            given = [np.asarray(inputs)]
        else:
            raise RequestError(f"model {self.model} takes inputs {[s.name for s in self.inputs]}: give a dict by name")
        fitted = [self._fit(array, spec) for array, spec in zip(given, self.inputs, strict=True)]
        added = {was_added for _, was_added in fitted}
        if len(added) > 1:
            raise RequestError("give the batch axis on every input, or on none")
        return [array for array, _ in fitted], added == {True}

    def _fit(self, array: NDArray[Any], spec: TensorSpec) -> tuple[NDArray[Any], bool]:
        accepted = [spec]
        if self._byte_input is not None and self._byte_input.name == spec.name:
            accepted.append(self._byte_input)
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

    def _response(self, received: wire.Frame, added_axis: bool) -> InferResponse:
        outputs = {}
        for tensor in received.tensors:
            array = from_wire(tensor).copy()
            outputs[self.outputs[tensor.number]] = array[0] if added_axis else array
        return InferResponse(
            model=self.model or "",
            release=int(self.welcome["release"]),
            outputs=outputs,
            stages=wire.stage_times(received),
            batch=received.arg,
            cache_hit=bool(received.flags & wire.FLAG_CACHE_HIT),
        )

    def _answer(self, deadline: float) -> wire.Frame:
        try:
            received = self._receive(deadline)
        except OSError as error:
            self.broken = True
            raise WorkerLost(f"the daemon dropped the connection during the request: {error}; send it again") from error
        if received is None:
            self.broken = True
            raise WorkerLost("the model's worker ended during the request; send it again")
        if received.kind == wire.MOVED:
            self.close()
            raise _Again
        if received.kind not in (wire.RESULT, wire.ERROR) or received.request_id not in (0, self._request_id):
            self.broken = True
            raise EdgeRTError(f"the daemon answered with frame {received.kind} for request {received.request_id}")
        return received

    def _send(self, parts: Sequence[wire.Buffer], deadline: float) -> None:
        self._set_timeout(deadline)
        try:
            send_all(self._sock, parts)
        except BlockingIOError as error:
            self.broken = True
            raise DeadlineExceeded("the daemon did not take the request in time; it may be overloaded") from error

    def _receive(self, deadline: float) -> wire.Frame | None:
        """The next frame, or None at the end of the connection."""
        frames = self._frames
        self._set_timeout(deadline)
        while (received := frames.next_frame()) is None:
            try:
                count = self._sock.recv_into(frames.writable())
            except BlockingIOError as error:
                self.broken = True
                raise DeadlineExceeded(
                    "no answer came in time; give a longer timeout_s or look at edgertd status"
                ) from error
            if not count:
                return None
            frames.wrote(count)
        return received

    def _set_timeout(self, deadline: float) -> None:
        """Let the kernel bound each send and receive: cheaper than a poll before every call.

        The bound is rounded up, so that requests of equal time-outs find it set already.
        """
        left_ms = max(1, -(-int((deadline - time.monotonic()) * 1000) // 50) * 50)
        if left_ms != self._timeout_ms:
            self._timeout_ms = left_ms
            value = struct.pack("ll", left_ms // 1000, left_ms % 1000 * 1000)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_all(sock: socket.socket, parts: Sequence[wire.Buffer]) -> None:
    """Send every byte of `parts`, in as few system calls as the kernel takes."""
    total = sum(map(len, parts))
    sent = sock.sendmsg(parts)
    if sent == total:
        return
    rest = memoryview(b"".join(parts))[sent:]
    sock.sendall(rest)


def _connect(path: Path, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(os.fspath(path))
        sock.settimeout(None)
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
