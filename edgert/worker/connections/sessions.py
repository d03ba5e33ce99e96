"""The sessions of a worker: their limits, and each session's memory between its requests.

A session belongs to one connection and ends with the connection. Before a session's first request, the worker reserves
the largest possible size of the session's memory. So the limits also apply to a client that opens sessions and never
uses them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edgert.config import ServingConfig
from edgert.errors import Overloaded, ProtocolError, RequestError, SessionLost
from edgert.printable import counted
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire, to_wire
from edgert.versions.installed import InstalledVersion
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.pipeline import Answer, Pipeline

FRAME_OVERHEAD_BYTES = 4096  # header, meta, descriptors and padding


class Sessions:
    """Opens sessions within the limits of `serving`; their memory must fit a frame of `frame_bytes_max`."""

    def __init__(
        self, pipeline: Pipeline, version: InstalledVersion, serving: ServingConfig, frame_bytes_max: int
    ) -> None:
        self.pipeline = pipeline
        self.form = pipeline.memory_form
        self.version = version
        self._frame_bytes_max = frame_bytes_max
        self.idle_s = serving.session_idle_s
        self._serving = serving
        self.count = 0
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        return self.count * self.form.size_bytes

    def open(self) -> ClientSession:
        """Return a new session. Raises Overloaded, and RequestError for a model without state and windows."""
        name, form, serving = self.version.manifest.model, self.form, self._serving
        if not form.has_memory:
            raise RequestError(f"model {name} has no state and no windows: send its requests without a session")
        if form.size_bytes + FRAME_OVERHEAD_BYTES > self._frame_bytes_max:
            raise RequestError(
                f"a session of model {name} needs up to {form.size_bytes} bytes of memory, but a frame has at most "
                f"{self._frame_bytes_max} bytes, and a session must fit a frame: raise [serving] frame_mb"
            )
        with self._lock:
            if self.count >= serving.sessions_max:
                raise Overloaded(
                    f"model {name} has {counted(self.count, 'session')}, the limit ([serving] sessions_max): close a session first"
                )
            if (size := (self.count + 1) * form.size_bytes) > serving.session_mb * 1e6:
                raise Overloaded(
                    f"the sessions of model {name} would keep {size / 1e6:.1f} MB, but {serving.session_mb:g} MB are the "
                    "limit ([serving] session_mb): close a session first"
                )
            self.count += 1
        return ClientSession(self)

    def release(self) -> None:
        """Release the reservation of a session that `open` returned."""
        with self._lock:
            self.count -= 1


class ClientSession:
    """One session. Its requests, one at a time, change its memory; a request that fails changes nothing."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._infer = sessions.pipeline.infer_in_session
        self.idle_s = sessions.idle_s
        self.memory = self._before = sessions.form.first

    def infer(self, inputs: ModelInputs, flags: int, arrived_ns: int, deadline_s: float | None) -> Answer:
        """Answer the next request, like `Pipeline.infer`."""
        self._before = self.memory
        answer, self.memory = self._infer(inputs, flags, arrived_ns, deadline_s, self.memory)
        return answer

    def undo(self) -> None:
        """Restore the memory as it was before the last request, which got no answer."""
        self.memory = self._before

    def moved(self) -> Sequence[wire.Buffer]:
        """Return the MOVED frame. If the session has started, the frame has the memory for the next worker."""
        version, memory = self._sessions.version, self.memory
        if memory is self._sessions.form.first:  # the client may still be sending its RESUME
            return [wire.json_frame(wire.MOVED, {})]
        origin = {"release": version.manifest.release, "version": version.digest, "skip": memory.skip}
        if version.manifest.state_id:
            origin["state_id"] = version.manifest.state_id
        tensors = [to_wire(i, array) for i, array in enumerate(memory.arrays)]
        return wire.frame(wire.MOVED, meta=wire.json_meta(origin), tensors=tensors)

    def resume(self, frame: wire.Frame) -> None:
        """Continue with the memory in a client's RESUME frame.

        The client sends this memory, so it is trusted no more than a request: it must have this version's form. Raises
        SessionLost for the memory of another version, ProtocolError for memory of another form.
        """
        origin, manifest = frame.json(), self._sessions.version.manifest
        same_version = origin.get("version") == self._sessions.version.digest
        same_state = manifest.state_id != "" and origin.get("state_id") == manifest.state_id
        if not (same_version or same_state):
            started_with = str(origin.get("release"))[:20]
            raise SessionLost(
                f"the session started with release {started_with}, which no longer serves, and release "
                f"{manifest.release} does not continue it: start a new session"
            )
        form, skip = self._sessions.form, origin.get("skip")
        if not form.fits(frame.tensors) or type(skip) is not int or not 0 <= skip < 2**31:
            raise ProtocolError("the memory of the session does not fit the model")
        arrays = [from_wire(tensor).copy() for tensor in frame.tensors]
        self.memory = self._before = form.first.with_arrays(arrays, skip)
