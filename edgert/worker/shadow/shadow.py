"""Shadow: also runs a sample of live requests on the FP32 reference, and compares the answers.

Theory of operation: a sampled request puts a copy of its inputs and its answer into a queue of QUEUE_MAX and continues.
If the queue is full, the request makes no copy. A thread sends the copy to the process
edgert.worker.shadow.shadow_process, which runs the reference at idle priority. There are two reasons for a separate
process. A thread of idle priority that holds Python's lock would delay the live threads. And a crash of the reference
affects nothing else.

The alarm is raised when the agreement of the last RECENT_MAX comparisons is below `alarm`. It is cleared when their
agreement is at least half way from `alarm` to 1.
"""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from edgert.checks.status import ShadowStatus
from edgert.errors import EdgeRTError, Unavailable
from edgert.protocol import wire
from edgert.protocol.arrays import to_wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.protocol.local_socket import send_all
from edgert.typed_json import to_json
from edgert.worker.shadow.agreement import Agreement
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage

QUEUE_MAX = 1
RECENT_MAX = 50
ALARM_MIN = 20  # the smallest number of comparisons for an alarm
RESTART_S = 60.0
FRAME_BYTES_MAX = 1024**3

Arrays = list[NDArray[Any]]


class Reference(Protocol):
    def compare(self, inputs: Arrays, outputs: Arrays) -> Agreement:
        """Compare `outputs` with the reference's answer to `inputs`. Raises EdgeRTError."""
        ...

    def close(self) -> None: ...


class Shadow:
    """Compares a share of the live answers with the answers of a reference.

    Args:
        share: The share of answers that are compared, among all answers that `offer` receives.
        alarm: The agreement below which the alarm is raised; 0 for no alarm.
        notify: Called with (event, fields) when the alarm is raised and when it is cleared.
    """

    def __init__(
        self,
        open_reference: Callable[[], Reference],
        share: float,
        alarm: float,
        notify: Callable[[str, Mapping[str, float]], None],
        choose: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_reference = open_reference
        self._share = share
        self._alarm = alarm
        self._notify = notify
        self._choose = choose
        self._clock = clock
        self._reference: Reference | None = None
        self._closed_until_s = 0.0
        self._queue: queue.Queue[tuple[Arrays, Arrays]] = queue.Queue(QUEUE_MAX)
        self._recent: deque[Agreement] = deque(maxlen=RECENT_MAX)
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self.sampled = self.agreed = self.dropped = self.failed = 0
        self.alarmed = False
        self.fault: str | None = None

    def start(self) -> None:
        self._thread.start()

    def offer(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> None:
        """Accept a live answer, without a wait. An answer that is not sampled costs 0.1 µs."""
        if self._choose() >= self._share:
            return
        if self._queue.full():
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(([a.copy() for a in inputs], [a.copy() for a in outputs]))
        except queue.Full:
            self.dropped += 1

    def stop_sampling(self) -> None:
        """Ignore all further offers."""
        self._share = 0.0

    def close(self) -> None:
        """End the reference; do not compare waiting requests."""
        self._closed_until_s = float("inf")
        if self._reference is not None:
            self._reference.close()

    def step(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compare one answer. The shadow's thread calls this for each sampled answer."""
        if self._clock() < self._closed_until_s:
            self.dropped += 1
            return
        try:
            if self._reference is None:
                self._reference = self._open_reference()
            agreement = self._reference.compare(inputs, outputs)
        except EdgeRTError as error:
            self._failed(error)
            return
        self.fault = None
        self.sampled += 1
        self.agreed += agreement.agrees
        self._recent.append(agreement)
        self._judge()

    def figures(self) -> dict[str, float]:
        """Return the figures. `drift` is the agreement of all answers minus that of the last RECENT_MAX."""
        recent = list(self._recent)
        share = sum(a.agrees for a in recent) / len(recent) if recent else 1.0
        overall = self.agreed / self.sampled if self.sampled else 1.0
        return {
            "shadow_total": self.sampled,
            "shadow_agree_total": self.agreed,
            "shadow_dropped_total": self.dropped,
            "shadow_agreement": round(share, 4),
            "shadow_cosine_mean": round(sum(a.cosine for a in recent) / len(recent), 6) if recent else 1.0,
            "shadow_cosine_min": round(min((a.cosine for a in recent), default=1.0), 6),
            "shadow_drift": round(overall - share, 4),
            "shadow_alarm": int(self.alarmed),
        }

    def status(self) -> ShadowStatus:
        figures = self.figures()
        return ShadowStatus(
            on=self._clock() >= self._closed_until_s,
            fault=self.fault,
            share=self._share,
            failed=self.failed,
            total=self.sampled,
            agree_total=self.agreed,
            dropped_total=self.dropped,
            agreement=figures["shadow_agreement"],
            cosine_mean=figures["shadow_cosine_mean"],
            cosine_min=figures["shadow_cosine_min"],
            drift=figures["shadow_drift"],
            alarm=self.alarmed,
        )

    def _run(self) -> None:
        while True:
            self.step(*self._queue.get())

    def _judge(self) -> None:
        figures = self.figures()
        share = figures["shadow_agreement"]
        if not self.alarmed and len(self._recent) >= ALARM_MIN and share < self._alarm:
            self.alarmed = True
            self._notify("shadow_alarm", self.figures())
        elif self.alarmed and share >= self._alarm + (1 - self._alarm) / 2:
            self.alarmed = False
            self._notify("shadow_recovered", self.figures())

    def _failed(self, error: EdgeRTError) -> None:
        """Close a reference that failed or ended. After RESTART_S, the next sampled answer opens it again."""
        self.failed += 1
        self.fault = error.message
        if self._reference is not None:
            self._reference.close()
            self._reference = None
        self._closed_until_s = max(self._closed_until_s, self._clock() + RESTART_S)


class ReferenceProcess:
    """A reference in its own process, at idle priority: the reference artifact of a version.

    With `as_served`, the reference is the artifact that a worker would serve. Raises Unavailable, and the errors of
    loading the version.
    """

    def __init__(self, load_message: LoadMessage, *, as_served: bool = False) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = link.start("edgert.worker.shadow.shadow_process", theirs)
            except OSError as error:
                ours.close()
                raise Unavailable(f"cannot start the reference's process: {error.strerror}") from error
        self._sock = ours
        self._frames = FrameBuffer(FRAME_BYTES_MAX)
        try:
            self._sock.sendall(wire.json_frame(wire.HELLO, {**to_json(load_message), "as_served": as_served}))
            self._receive()
        except BaseException:
            self.close()
            raise

    def compare(self, inputs: Arrays, outputs: Arrays) -> Agreement:
        tensors = [to_wire(i, array) for i, array in enumerate((*inputs, *outputs))]
        try:
            send_all(self._sock, wire.frame(wire.INFER, tensors=tensors))
        except OSError as error:
            raise Unavailable(f"the reference's process has ended: {error}") from error
        value = self._receive().json()
        return Agreement(bool(value["agrees"]), float(value["cosine"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._sock.close()

    def _receive(self) -> wire.Frame:
        """Return the next frame. Raises the error of an ERROR frame, and Unavailable if the process has ended."""
        while True:
            try:
                count = self._sock.recv_into(self._frames.room)
            except OSError as error:
                raise Unavailable(f"the reference's process has ended: {error}") from error
            if not count:
                raise Unavailable(f"the reference's process ended with {self._process.poll()}")
            if (received := self._frames.feed(count)) is not None:
                break
        if received.kind == wire.ERROR:
            raise wire.error_of(received)
        return received
