"""One connection of the blocking client: sends requests and waits for their answers."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from socket import MSG_DONTWAIT

import numpy as np

from edgert.client.conversation import RETRY_PAUSE_S, Conversation, Outputs, Retry, timeout_us
from edgert.client.model_interface import Inputs
from edgert.errors import EdgeRTError
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FORM
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, WAIT_S_MAX, dial, timeval
from edgert.protocol.sharing import receive_with_descriptor
from edgert.tensors import InferResponse

_write_varying, _read_form = wire.VARYING.pack_into, FORM.unpack_from


class Connection:
    """One connection to one model, or to the daemon (model None)."""

    def __init__(self, path: Path, conversation: Conversation, deadline: float) -> None:
        self.closed = False
        self.conversation = conversation
        self._timeout_s, self._timeout_us, self._timeout_ms = 0.0, 0, 0
        hello = conversation.hello()
        self._sock = dial(path, deadline)
        with contextlib.suppress(OSError):  # `_greet` reports the reason
            self._sock.sendall(hello)  # sent early, so that the daemon reads it during the rest of this set-up
        self._watched = select.poll()
        self._watched.register(self._sock, select.POLLIN)
        # When the daemon reads the request, the kernel wakes a thread that sleeps in `recv`, but not one that sleeps in
        # `poll`. So a poll before each receive is faster if the client would otherwise take processor time from the
        # daemon or from other clients (decision 27). But in a process with several threads, each system call releases
        # Python's lock, so a poll costs more time than it saves.
        one_thread = threading.active_count() == 1
        self._many_flag = wire.FLAG_MANY if one_thread else 0
        # A periodic signal restarts the kernel's time-out of a receive again and again, but not the time-out of a poll.
        self._interrupted = signal.getitimer(signal.ITIMER_REAL)[1] > 0
        self._always_polls = self._interrupted or (one_thread and len(os.sched_getaffinity(0)) == 1)
        self._polls: int = self._always_polls  # whether to poll before the next receive
        try:
            self._greet(deadline)
        except BaseException:
            self.close()
            raise

    def request(
        self, inputs: Inputs, timeout_s: float, deadline: float, flags: int, trace: bool
    ) -> Outputs | InferResponse:
        """Send one request and return its answer. Raises the daemon's error, WorkerLost, Retry.

        A request of the last request's form, whose answer also has the last form, calls no other Python function: if
        many clients share a core, each function costs cache misses (decision 12).
        """
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        conversation, sock = self.conversation, self._sock
        parts: Sequence[wire.Buffer] = ()
        repeatable = conversation.repeatable
        if repeatable is not None and not trace and type(inputs) is np.ndarray:
            shape, dtype, target, frame, form, views = repeatable
            if inputs.shape == shape and inputs.dtype == dtype:
                target[...] = inputs
                conversation.request_id += 1
                _write_varying(
                    frame, wire.VARYING_OFFSET, flags, conversation.request_id, conversation.model_id, self._timeout_us
                )
                parts = (frame,)
        if not parts:
            repeatable = None
            parts = conversation.request(inputs, flags, self._timeout_us, trace)
        try:
            try:
                sent = sock.send(parts[0], MSG_DONTWAIT) if len(parts) == 1 else sock.sendmsg(parts, (), MSG_DONTWAIT)
            except OSError:  # `_send_rest` tries again
                sent = 0
            if sent != conversation.size_bytes:
                self._send_request(parts, sent, deadline)
            try:
                if self._polls and not self._watched.poll(self._timeout_ms):
                    raise BlockingIOError
                room = conversation.frames.room
                count = sock.recv_into(room)
            except OSError as error:
                raise self._lost(error) from error
            if repeatable is not None:
                size, head, lengths, place, descriptors = form
                answer_head, answer_flags, answered, answer_lengths = _read_form(room)
                if (
                    count == size
                    and answered == conversation.request_id
                    and answer_head == head
                    and answer_lengths == lengths
                    and not answer_flags & wire.FLAG_SHARED
                    and place == descriptors
                ):
                    self._polls = self._always_polls or answer_flags & self._many_flag
                    outputs = {}
                    for name, view in views:  # a loop, because Python before 3.12 calls a function for a comprehension
                        outputs[name] = view.copy()
                    return outputs
            event = conversation.received(self._frame(count, deadline))
            if conversation.frames.more and (moved := conversation.frames.feed(0)) is not None:
                conversation.received(moved)  # the worker reads no further request
        except BaseException:  # the next request must not receive a late answer
            self.close()
            raise
        if conversation.over:
            self.close()
        if isinstance(event, Exception):
            raise event
        return event

    def send_resume(self, frame: bytes, deadline: float) -> None:
        """Send a session's memory to the new worker. The worker answers only if it refuses the memory."""
        self.conversation.resume = frame  # until the worker sends a newer RESUME
        with contextlib.suppress(OSError):  # the next request reports the reason
            self._send_rest((frame,), 0, deadline)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.close()

    def _greet(self, deadline: float) -> None:
        conversation = self.conversation
        self._set_timeout(deadline - time.monotonic())
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            if self._interrupted and not self._watched.poll(self._timeout_ms):
                raise BlockingIOError
            count, descriptor = receive_with_descriptor(self._sock, conversation.frames.room)
        except BlockingIOError as error:
            raise conversation.timed_out(sent=True) from error
        except OSError as error:
            raise conversation.ended(True, error) from error
        conversation.map_memory(descriptor)
        if not count:
            raise conversation.ended(True)
        event = conversation.received(conversation.frames.feed(count) or self._receive(deadline))
        if isinstance(event, Exception):
            raise event

    def _send_request(self, parts: Sequence[wire.Buffer], sent: int, deadline: float) -> None:
        """Send a request without its first `sent` bytes. Raises DeadlineExceeded, or the daemon's error."""
        try:
            self._send_rest(parts, sent, deadline)
        except BlockingIOError as error:
            raise self.conversation.timed_out(sent=False) from error
        except OSError as error:
            raise self._early_error(deadline) from error

    def _send_rest(self, parts: Sequence[wire.Buffer], sent: int, deadline: float) -> None:
        """Send `parts` without their first `sent` bytes. Raises BlockingIOError at the deadline.

        A blocking send could exceed the deadline: each piece that the daemon reads, and each signal, restarts the
        kernel's time-out.
        """
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        for part in parts:
            left = memoryview(part)[sent:]
            sent = max(0, sent - len(part))
            while left:
                wait_s = min(WAIT_S_MAX, max(0.0, deadline - time.monotonic()))
                if not writable.poll(math.ceil(wait_s * 1000)):
                    raise BlockingIOError
                left = left[self._sock.send(left, MSG_DONTWAIT) :]

    def _receive(self, deadline: float) -> wire.Frame:
        """Return the next frame. Raises DeadlineExceeded, or the reason why the connection ended."""
        return self._frame(self._receive_bytes(), deadline)

    def _receive_bytes(self) -> int:
        """Receive into the conversation's buffer; return the number of bytes. Raises as `_receive` does."""
        try:
            if self._polls and not self._watched.poll(self._timeout_ms):
                raise BlockingIOError
            return self._sock.recv_into(self.conversation.frames.room)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Exception:
        """Return what `error` of a receive means: a time-out, or the end of the connection."""
        if isinstance(error, BlockingIOError):
            return self.conversation.timed_out(sent=True)
        return self.conversation.ended(True, error)

    def _frame(self, count: int, deadline: float) -> wire.Frame:
        """Return the frame whose next `count` bytes have arrived. Raises as `_receive` does."""
        while True:
            if not count:
                raise self.conversation.ended(True)
            if (frame := self.conversation.frames.feed(count)) is not None:
                self._polls = self._always_polls or frame.flags & self._many_flag
                return frame
            self._set_timeout(deadline - time.monotonic())
            count = self._receive_bytes()

    def _early_error(self, deadline: float) -> Exception:
        """Return the daemon's error if it is final, else a Retry. The daemon closed during the request."""
        if not self.conversation.is_session:  # wait longer for MOVED, which has the memory of the session
            deadline = time.monotonic() + RETRY_PAUSE_S
        self._set_timeout(deadline - time.monotonic())
        try:
            frames = self.conversation.frames
            arrived = frames.feed(0) if frames.more else None  # MOVED may have arrived with the WELCOME
            event = self.conversation.received(arrived or self._receive(deadline))
        except (EdgeRTError, Retry):
            return Retry()
        return event if isinstance(event, EdgeRTError) and not event.retryable else Retry()

    def _set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of each receive."""
        timeout_s = max(0.0, timeout_s)
        self._timeout_s, self._timeout_us = timeout_s, timeout_us(timeout_s)
        self._timeout_ms = math.ceil(min(WAIT_S_MAX, timeout_s) * 1000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(timeout_s))
