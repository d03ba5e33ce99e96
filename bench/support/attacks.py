"""Hostile clients: each attack in its own process, started and stopped on command.

They run at a low priority (nice 10), so a good client suffers from the work that they cause in the daemon more than
from their own processor time.
"""

from __future__ import annotations

import array
import contextlib
import multiprocessing
import os
import random
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from edgert.protocol import wire
from edgert.protocol.local_socket import timeval

NICE = 10
CONNECTIONS = 3000
HOLD = 600  # more than a model's limit of connections
SLOW = 50
IO_S = 2.0
DESCRIPTORS = 200  # the kernel accepts at most 253 per message

Going = Callable[[], bool]
Attached = list[tuple[int, int, "array.array[int]"]]


def malformed(path: Path, model: str, going: Going) -> int:
    """Send whole frames with bytes changed at random, as fast as possible."""
    draw, good, done = random.Random(1), _request(), 0
    while going():
        spoiled = bytearray(good)
        for _ in range(draw.randint(1, 8)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        with _connected(path) as sock:
            sock.sendall(_hello(model) + spoiled)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        done += 1
    return done


def truncated(path: Path, model: str, going: Going) -> int:
    """End connections at any point of a hello or a request."""
    draw, whole, done = random.Random(2), _hello(model) + _request(), 0
    while going():
        with _connected(path) as sock:
            sock.sendall(whole[: draw.randrange(len(whole))])
        done += 1
    return done


def slow(path: Path, model: str, going: Going) -> int:
    """Send byte by byte on many connections."""
    data, done = _hello(model) + _request(), 0
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(_connected(path)) for _ in range(SLOW)]
        at = [number % len(data) // 2 for number in range(SLOW)]
        while going():
            for number, sock in enumerate(socks):
                try:
                    sock.send(data[at[number] : at[number] + 1])
                    at[number] += 1
                except OSError:
                    at[number] = len(data)
                if at[number] >= len(data):
                    sock.close()
                    socks[number] = held.enter_context(_connected(path))
                    at[number] = 0
                    done += 1
            time.sleep(0.005)
    return done


def many_connections(path: Path, model: str, going: Going) -> int:
    """Open thousands of connections and send only the beginning of a hello."""
    held: deque[socket.socket] = deque()
    done = 0
    try:
        while going():
            with contextlib.suppress(OSError):
                sock = _connected(path)
                held.append(sock)
                sock.send(_hello(model)[:10])
                done += 1
            if len(held) > CONNECTIONS:
                held.popleft().close()
    finally:
        for sock in held:
            sock.close()
    return done


def holding(path: Path, model: str, going: Going) -> int:
    """Hold as many connections to the model as one app can get."""
    held: list[socket.socket] = []
    done = 0
    try:
        while going():
            if len(held) >= HOLD:
                time.sleep(0.01)
                continue
            with contextlib.suppress(OSError):
                sock = _connected(path)
                held.append(sock)
                sock.sendall(_hello(model))
                done += 1
    finally:
        for sock in held:
            sock.close()
    return done


def descriptors(path: Path, model: str, going: Going) -> int:
    """Attach hundreds of descriptors to hellos and requests. Newer kernels refuse each one (EPERM)."""
    passed = os.open("/dev/null", os.O_RDONLY)
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed] * DESCRIPTORS))]
    done = 0
    while going():
        with contextlib.suppress(OSError), _connected(path) as sock:
            _send_attached(sock, _hello(model), attached)
            sock.recv(65536)
            for _ in range(3):
                _send_attached(sock, _request(), attached)
                sock.recv(65536)
                done += 1
    os.close(passed)
    return done


def never_reading(path: Path, model: str, going: Going) -> int:
    """Send requests one after another and read no answer."""
    request, done = _request(), 0
    with contextlib.ExitStack() as held:
        socks: list[socket.socket] = []
        while going():
            if len(socks) < 8:
                sock = held.enter_context(_connected(path))
                sock.setblocking(False)
                socks.append(sock)
                with contextlib.suppress(OSError):
                    sock.send(_hello(model))
            for number, sock in enumerate(socks):
                try:
                    sock.send(request)
                    done += 1
                except BlockingIOError:
                    continue
                except OSError:
                    sock.close()
                    del socks[number]
                    break
            else:
                time.sleep(0.001)
    return done


ATTACKS = {
    "malformed frames": malformed,
    "truncated frames": truncated,
    "slow senders": slow,
    "thousands of connections": many_connections,
    "all connections held": holding,
    "descriptors attached": descriptors,
    "answers never read": never_reading,
}


class Attacker:
    """One attack on a model, in a process that waits for the command to begin."""

    def __init__(self, name: str, path: Path, model: str) -> None:
        context = multiprocessing.get_context("fork")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_attack, args=(theirs, name, path, model), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self) -> None:
        self._pipe.send(True)

    def end(self) -> int:
        """Stop with all connections closed; return the number of strikes."""
        self._pipe.send(False)
        return int(self._pipe.recv())

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)


def _attack(pipe: Connection, name: str, path: Path, model: str) -> None:
    os.nice(NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(EOFError):
        while pipe.recv():
            done = 0
            while not pipe.poll():
                with contextlib.suppress(OSError):  # the daemon refused or just restarted: try again
                    done += ATTACKS[name](path, model, lambda: not pipe.poll())
            pipe.recv()
            pipe.send(done)


def _send_attached(sock: socket.socket, frame: bytes, attached: Attached) -> None:
    """Send `frame` with descriptors, or without them where the kernel refuses them for the daemon."""
    try:
        sock.sendmsg([frame], attached)
    except PermissionError:
        sock.sendall(frame)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(IO_S))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(IO_S))
        sock.connect(os.fspath(path))
    except OSError:
        sock.close()
        raise
    return sock


def _hello(model: str) -> bytes:
    return wire.json_frame(wire.HELLO, {"model": model})


def _request(shape: tuple[int, ...] = (1, 1, 8, 8)) -> bytes:
    values = np.zeros(shape, np.float32)
    tensor = wire.OutTensor(wire.descriptor(0, "FP32", values.shape, values.nbytes), values.tobytes())
    return b"".join(wire.frame(wire.INFER, request_id=1, tensors=[tensor]))
