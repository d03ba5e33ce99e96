"""Shadow: a sampled share of live requests also goes through the FP32 reference; how far the answers agree.

Theory of operation: a request that is drawn leaves a copy of its inputs and its answer in a queue of QUEUE_MAX and
goes on; where the queue is full the copy is not even made. A thread of its own takes it from there to a process of
its own (edgert.worker.shadow_process), which runs the reference at idle priority. A process, because a thread of
idle priority that holds Python's lock would hold up the live ones; and a reference that crashes costs nobody else.

The alarm goes off where the last WINDOW comparisons agree less often than `alarm`, and is over once they are half
way from there to perfect agreement.
"""

from __future__ import annotations

import os
import queue
import random
import socket
import subprocess
import sys
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
from edgert.worker.agreement import Agreement

QUEUE_MAX = 1
WINDOW = 50
ALARM_MIN = 20  # comparisons before the alarm may go off
RESTART_S = 60.0
FRAME_BYTES_MAX = 1024**3

Arrays = list[NDArray[Any]]


class Reference(Protocol):
    """Where the reference runs."""

    def compare(self, inputs: Arrays, outputs: Arrays) -> Agreement:
        """How far `outputs` agree with the reference's answer to `inputs`. Raises EdgeRTError."""
        ...

    def close(self) -> None: ...


class Shadow:
    """Compares a `share` of what `offer` is told of with the reference that `open_reference` opens.

    `notify` hears (event, fields) when the alarm goes off and when it is over. `choose` gives numbers in 0 ... 1.
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
        self._open_reference, self._share, self._alarm = open_reference, share, alarm
        self._notify, self._choose, self._clock = notify, choose, clock
        self._reference: Reference | None = None
        self._closed_until_s = 0.0
        self._queue: queue.Queue[tuple[Arrays, Arrays] | None] = queue.Queue(QUEUE_MAX)
        self._recent: deque[Agreement] = deque(maxlen=WINDOW)
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self.sampled = self.agreed = self.dropped = self.failed = 0
        self.alarmed = False
        self.fault: str | None = None

    def start(self) -> None:
        self._thread.start()

    def offer(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> None:
        """Called with every live answer; never waits. A tenth of a microsecond for one that is not drawn."""
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
        """What is offered from now on is not compared."""
        self._share = 0.0

    def close(self) -> None:
        """End the reference; what waits is not compared any more."""
        self._closed_until_s = float("inf")
        if self._reference is not None:
            self._reference.close()

    def step(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compare one answer; its thread does this for each that was drawn."""
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
        """What telemetry reports. `drift`: by how much the last WINDOW answers agreed less than all did."""
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
        while (job := self._queue.get()) is not None:
            self.step(*job)

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
        """The reference failed or is gone: leave it alone for a while, then open it anew."""
        self.failed += 1
        self.fault = error.message
        if self._reference is not None:
            self._reference.close()
            self._reference = None
        self._closed_until_s = max(self._closed_until_s, self._clock() + RESTART_S)


class ReferenceProcess:
    """The reference in a process of its own at idle priority. `order` is a LoadOrder's JSON. Raises Unavailable."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "edgert.worker.shadow_process", "--channel", str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            except OSError as error:
                ours.close()
                raise Unavailable(f"the reference's process cannot be started: {error.strerror}") from error
        self._sock = ours
        self._frames = FrameBuffer(FRAME_BYTES_MAX)
        try:
            self._sock.sendall(wire.json_frame(wire.HELLO, dict(order)))
            self._receive()
        except BaseException:
            self.close()
            raise

    def compare(self, inputs: Arrays, outputs: Arrays) -> Agreement:
        tensors = [to_wire(i, array) for i, array in enumerate((*inputs, *outputs))]
        try:
            send_all(self._sock, wire.frame(wire.INFER, tensors=tensors))
        except OSError as error:
            raise Unavailable(f"the reference's process is gone: {error}") from error
        value = self._receive().json()
        return Agreement(bool(value["agrees"]), float(value["cosine"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._sock.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _receive(self) -> wire.Frame:
        """The next frame. Raises what an ERROR frame says, and Unavailable at the end."""
        while True:
            try:
                count = self._sock.recv_into(self._frames.room)
            except OSError as error:
                raise Unavailable(f"the reference's process is gone: {error}") from error
            if not count:
                raise Unavailable(f"the reference's process ended with {self._process.poll()}")
            received = self._frames.feed(count)
            if received is not None:
                break
        if received.kind == wire.ERROR:
            raise wire.error_of(received)
        return received


def sched_idle(pid: int) -> bool:
    """Whether a process runs at idle priority only."""
    return os.sched_getscheduler(pid) == os.SCHED_IDLE
