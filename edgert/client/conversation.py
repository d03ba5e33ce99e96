"""One connection of a client, without its socket: bytes to send, and the meaning of received frames.

Both clients only move bytes. They send the bytes that `hello` and `request` return, receive into `frames`, and pass
each frame to `received`. `received` returns the answer, or the error to raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.client.model_interface import Inputs, ModelInterface
from edgert.errors import DaemonUnreachable, DeadlineExceeded, EdgeRTError, SessionLost, Unavailable, WorkerLost
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire, signature_of
from edgert.protocol.frame_buffer import FrameBuffer, FrameForm
from edgert.protocol.frame_builder import FrameBuilder
from edgert.protocol.hello import HelloFlags, hello_frame
from edgert.protocol.sharing import SHARE_BYTES_MIN, SharedArea
from edgert.tensors import InferResponse

OVERLOADED = "the device may be overloaded: try again later, or give a longer timeout_s"
TIMEOUT_US_MAX = 2**32 - 1
RETRY_PAUSE_S = 0.05

# The reasons why this client has ended a session.
SESSION_CLOSED = "the session is closed"
SESSION_INHERITED = "the session belongs to the parent process"
SESSION_BUSY = "another request of this session is in progress; send one request at a time, or use a session for each thread or task"
SESSION_NOT_COPIED = "a session cannot be pickled or copied; start a session in the other process"
SESSION_UNANSWERED = "an earlier request of the session got no answer, so its memory is not known"

Outputs = dict[str, NDArray[Any]]

# Facts about the last request and its answer, for the next request of the same form:
# - the shape and dtype of the request's array, the memory of this array in the frame, and the frame to send;
# - the form of the answer, and the outputs: arrays over the receive buffer, by name.
# These facts are a plain tuple, because Python unpacks a plain tuple fastest.
Repeatable = tuple[tuple[int, ...], np.dtype[Any], NDArray[Any], bytearray, FrameForm, list[tuple[str, NDArray[Any]]]]


class Retry(Exception):
    """The request reached no engine. Repeat it over a new connection, after the pause of `error`."""

    def __init__(self, error: Unavailable | None = None) -> None:
        super().__init__()
        self.error = error

    def wait_s(self, left_s: float) -> float:
        """Return the pause before the next attempt. Raises an error if too little time is left."""
        if self.error is None:  # the model moved to another worker, which is ready
            if left_s <= 0:
                raise DeadlineExceeded(
                    "the time-out passed while the model moved to another worker; repeat the request"
                )
            return 0.0
        wait_s = self.error.retry_after_s or RETRY_PAUSE_S
        if wait_s >= left_s:
            raise self.error
        return wait_s


Event = Outputs | InferResponse | EdgeRTError | Retry


class Conversation:
    """A hello to `model` (None: to the daemon), then requests and their answers, one after the other.

    Read these attributes: `over` tells that the connection must be closed. After `request`, `size_bytes` is the number
    of bytes to send. If the daemon `moved` the session, `resume` is the frame to send after the next connection's
    hello; it is empty if the session has no memory yet. If the conversation is `outgrown`, the next connection should
    request shared memory.

    Args:
        path: The socket, for messages.
        share: Whether to request shared memory.
        may_share: Whether the first frame that is large enough for shared memory makes the conversation `outgrown`. Has
            no effect with `share`.
        probe: Whether a check or a benchmark sends the requests, not an app.
        session: Whether each request continues the previous request.
    """

    def __init__(
        self,
        model: str | None,
        path: Path,
        *,
        share: bool,
        may_share: bool = False,
        probe: bool = False,
        session: bool = False,
    ) -> None:
        self.frames = FrameBuffer()
        self.welcome: dict[str, Any] = {}
        self.over = False
        self.size_bytes = 0
        self._model = model
        self._path = path
        self._share = share and model is not None
        self._probe = probe
        self._may_share = may_share and not share
        self.outgrown = False
        self.is_session = session
        self.resume = b""
        self.moved = False
        self._area: SharedArea | None = None
        self._interface: ModelInterface | None = None  # None until the WELCOME has arrived
        # The last request: the shapes and dtypes of the app's arrays, if they needed no conversion.
        self.request_id = 0
        self._trace = False
        self._signature: tuple[Any, ...] | None = None
        self._added_axis = False
        # The last answer: arrays over the receive buffer, kept while answers have the same form.
        self._tensors: tuple[wire.WireTensor, ...] | None = None
        self._views: list[tuple[str, NDArray[Any]]] = []
        # Not None if a request had one short array, and its answer was like the answer before it.
        self.repeatable: Repeatable | None = None

    def hello(self) -> bytes:
        """Return the first frame of the connection, which may request shared memory and a session."""
        return hello_frame(self._model, HelloFlags(self._share, self._probe, self.is_session))

    def map_memory(self, descriptor: int | None) -> None:
        """Map the shared memory of a `descriptor` that arrived with the first bytes; close the descriptor."""
        if descriptor is not None and (area := SharedArea.open(descriptor)) is not None:
            self._area, self.frames.shared = area, area.response

    def request(self, inputs: Inputs, flags: int, timeout_us: int, trace: bool = False) -> Sequence[wire.Buffer]:
        """Return the buffers of an INFER frame; send the buffers before the next call. Raises RequestError.

        With `trace`, the answer is an InferResponse. Long arrays are sent from their own memory. Raises Retry for the
        first large request of a conversation without shared memory, if the next conversation may get it.
        """
        self.request_id = request_id = self.request_id + 1
        self.repeatable = None
        interface = self._interface
        assert interface is not None  # the daemon has greeted
        frame = self._frame
        self._trace = trace
        given = (inputs,) if type(inputs) is np.ndarray else self._arrays_by_name(inputs)
        signature = signature_of(given)
        if signature == self._signature:
            return frame.update(given, flags, request_id, timeout_us)
        self._signature = self._tensors = None  # the next answer may have or lack a batch axis, unlike the last one
        arrays, self._added_axis = interface.arrays(inputs)
        parts = frame.parts(arrays, interface.numbers(len(arrays)), flags, request_id, timeout_us)
        self.size_bytes = frame.sent_bytes
        if self._may_share and frame.frame_bytes >= SHARE_BYTES_MIN:
            self.outgrown = True
            raise Retry
        if [array.dtype for array in given] == [array.dtype for array in arrays]:  # nothing was converted
            self._signature = signature
        return parts

    def received(self, frame: wire.Frame) -> Event:
        """Return the meaning of `frame` for the hello or the current request: an answer, an error or a Retry.

        The answer to a hello is the content of the WELCOME. Raises ProtocolError and EdgeRTError: close the connection
        after such an error.
        """
        self.repeatable = None
        interface = self._interface
        if frame.kind == wire.RESULT and interface is not None and frame.request_id == self.request_id:
            if frame.tensors is not self._tensors:
                self._map_outputs(frame.tensors, interface.outputs)
            elif not self._trace and self._signature is not None:
                sent, form = self._frame.kept_array(), self.frames.form()
                if sent is not None and form is not None:
                    self.repeatable = *self._signature, *sent, form, self._views
            outputs = {name: view.copy() for name, view in self._views}
            return _response(interface, frame, outputs) if self._trace else outputs
        if frame.kind == wire.ERROR and frame.request_id == self.request_id:
            self.over = interface is None
            error = wire.error_of(frame)
            if self.over and isinstance(error, Unavailable) and error.retry_after_s is not None:
                return Retry(error)  # send the hello again after the daemon's pause
            return error
        self.over = True
        if frame.kind == wire.ERROR and frame.request_id == 0:  # an error of the connection: no engine saw the request
            error = wire.error_of(frame)
            return Retry() if error.retryable else error
        if frame.kind == wire.MOVED:
            self.moved = interface is not None
            if frame.tensors:
                self.resume = wire.resumed(frame)
            return _restarting() if interface is None else Retry()
        if frame.kind == wire.WELCOME and interface is None:
            self.over = False
            self._greeted(frame)
            return self.welcome
        return EdgeRTError(
            f"the daemon answered request {frame.request_id} with an unexpected frame of kind {frame.kind}: please report "
            "this fault"
        )

    def ended(self, sent: bool, cause: OSError | None = None) -> Exception:
        """Return the error for a lost connection; `sent` means that the daemon may have the whole request."""
        self.over = True
        error: Exception
        if self._interface is None and cause is not None:
            error = DaemonUnreachable(
                f"the daemon closed the connection before it answered: {cause}; try again, or check edgertd status"
            )
        elif self._interface is None:
            error = _restarting()
        elif not sent:  # no engine saw the request
            error = Retry()
        elif cause is None:
            error = WorkerLost("the model's worker ended during the request; send it again")
        else:
            error = WorkerLost(f"the daemon closed the connection during the request: {cause}; send it again")
        error.__cause__ = cause
        return error

    def timed_out(self, sent: bool) -> DeadlineExceeded:
        """Return the error of a time-out that has passed. `sent` has the same meaning as for `ended`."""
        self.over = True
        if self._interface is None:
            return DeadlineExceeded(
                f"nothing answered at {self._path} in time: check with edgertd status that this is the daemon's socket. "
                f"If it is, {OVERLOADED}"
            )
        if not sent:
            return DeadlineExceeded(f"the daemon did not accept the request in time; {OVERLOADED}")
        return DeadlineExceeded(
            "no answer arrived in time: allow more time, or check the model's latency with edgertd status"
        )

    def _greeted(self, frame: wire.Frame) -> None:
        self.welcome = frame.json()
        self._interface = ModelInterface(self._model or "", self.welcome)
        self.model_id = frame.model_id
        self._frame = FrameBuilder(wire.INFER, frame.model_id, None if self._area is None else self._area.request)
        self.frames.limit(self._interface.frame_bytes_max)

    def _arrays_by_name(self, inputs: Inputs) -> tuple[NDArray[Any], ...]:
        """Return a dict's arrays in the model's order; () if it has other names, or values that are no arrays."""
        assert self._interface is not None  # the caller has checked
        specs = self._interface.inputs
        if type(inputs) is not dict or len(inputs) != len(specs):
            return ()
        given: tuple[Any, ...] = tuple(inputs.get(spec.name) for spec in specs)
        return given if all(type(array) is np.ndarray for array in given) else ()

    def _map_outputs(self, tensors: tuple[wire.WireTensor, ...], names: Sequence[str]) -> None:
        if any(tensor.number >= len(names) for tensor in tensors):
            raise EdgeRTError(
                "the daemon's answer has an output that the model does not have: please report this fault"
            )
        views = [(names[tensor.number], from_wire(tensor)) for tensor in tensors]
        self._views = [(name, view[0, ...]) for name, view in views] if self._added_axis else views
        self._tensors = tensors
        self.outgrown = self._may_share and sum(len(tensor.data) for tensor in tensors) >= SHARE_BYTES_MIN


def session_lost(cause: Retry | WorkerLost) -> SessionLost:
    """Return the error that the app gets when the connection of its session ends."""
    error = cause.error if isinstance(cause, Retry) else cause
    why = "the model's worker ended" if error is None else error.message
    return SessionLost(f"{why}, and the memory of the session is lost: start a new session")


def session_ended(reason: str) -> SessionLost:
    """Return the error of a session that this client has ended, for one of the reasons above."""
    return SessionLost(f"{reason}: start a new session")


def timeout_us(timeout_s: float) -> int:
    """Return a time-out in the unit of an INFER frame: microseconds, at least one."""
    return min(int(min(TIMEOUT_US_MAX, timeout_s * 1e6)) + 1, TIMEOUT_US_MAX)


def _restarting() -> Retry:
    message = "the daemon is restarting this model: try again, or give a longer timeout_s"
    return Retry(Unavailable(message, retry_after_s=RETRY_PAUSE_S))


def _response(interface: ModelInterface, frame: wire.Frame, outputs: Outputs) -> InferResponse:
    return InferResponse(
        model=interface.model,
        release=interface.release,
        outputs=outputs,
        stages=wire.stage_times(frame),
        batch=frame.arg,
        cache_hit=bool(frame.flags & wire.FLAG_CACHE_HIT),
    )
