"""A bad link in user space: two TAP devices, and a process that passes packets between them.

One of the devices is in a network namespace.

Rate, delay and loss apply to IP packets, so the kernel's own TCP reacts to them. Needs root and /dev/net/tun; leaves
nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import struct
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TAP_NO_INFO = 0x0002 | 0x1000
_PACKET_BYTES_MAX = 2048
_QUEUE_S = 0.3  # the buffer of a home router; more is dropped
HERE, THERE = "198.18.77.1", "198.18.77.2"  # the address range for benchmarks (RFC 2544)


@dataclass(frozen=True)
class Quality:
    """The quality of each direction: bits per second, seconds of delay, share of packets lost."""

    bits_per_s: float
    delay_s: float
    loss: float


def why_not() -> str:
    """Return the reason why no link can be made here, or "" if a link can be made."""
    if os.geteuid() != 0:
        return "needs root, for a network namespace"
    return "" if Path("/dev/net/tun").exists() else "needs /dev/net/tun"


class Link:
    """A link between `HERE` and `THERE` in the namespace; `within` before a command runs it there."""

    def __init__(self, quality: Quality, seed: int) -> None:
        self.name = f"edgert-link-{os.getpid()}"
        self.within = ("ip", "netns", "exec", self.name)
        context = multiprocessing.get_context("fork")
        self._bytes: Synchronized[int] = context.Value("q", 0)
        _ip("netns", "add", self.name)
        try:
            here, there = _tap("edgert-here", ""), _tap("edgert-there", self.name)
            _ip("addr", "add", f"{HERE}/30", "dev", "edgert-here")
            _ip("link", "set", "edgert-here", "up")
            _ip("-n", self.name, "addr", "add", f"{THERE}/30", "dev", "edgert-there")
            _ip("-n", self.name, "link", "set", "edgert-there", "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            _ip("netns", "delete", self.name)
            raise
        self._process = context.Process(target=_pass, args=(here, there, quality, seed, self._bytes), daemon=True)
        self._process.start()
        os.close(here)
        os.close(there)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        _ip("netns", "delete", self.name)

    @property
    def bytes_carried(self) -> int:
        """Return the bytes of both directions as Ethernet frames, lost ones included."""
        return self._bytes.value


def _pass(here: int, there: int, quality: Quality, seed: int, carried: Synchronized[int]) -> None:
    chance, under_way, number = random.Random(seed), list[tuple[float, int, int, bytes]](), 0
    other, free_at = {here: there, there: here}, {here: 0.0, there: 0.0}
    poll = select.poll()
    for side in other:
        os.set_blocking(side, False)
        poll.register(side, select.POLLIN)
    while True:
        wait_ms = max(0.0, under_way[0][0] - time.monotonic()) * 1e3 if under_way else None
        for side, _ in poll.poll(wait_ms):
            try:
                packet = os.read(side, _PACKET_BYTES_MAX)
            except BlockingIOError:
                continue
            now = time.monotonic()
            if free_at[side] - now > _QUEUE_S:
                continue
            free_at[side] = max(now, free_at[side]) + len(packet) * 8 / quality.bits_per_s
            carried.value += len(packet)
            if chance.random() >= quality.loss:
                number += 1
                heapq.heappush(under_way, (free_at[side] + quality.delay_s, number, other[side], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, side, packet = heapq.heappop(under_way)
            os.write(side, packet)


def _tap(name: str, namespace: str) -> int:
    """Open a TAP device of that name in a namespace ("": this one); it vanishes with its last descriptor."""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if namespace:
            theirs = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            _enter(libc, theirs)
            os.close(theirs)
        tap = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_NO_INFO))
        return tap
    finally:
        _enter(libc, ours)
        os.close(ours)


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
