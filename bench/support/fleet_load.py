"""Simulated devices: each with its own connection and the MQTT 3.1.1 that a device needs, from one thread.

A real client library would cost more than the measured broker and exporter. The messages are like a device's messages:
`info` and `status` retained, then `metrics`, `hist` and `sys` of each window, spread over the window.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field

import numpy as np

from edgert.telemetry import messages, stages
from edgert.telemetry.messages import Topics
from edgert.telemetry.sketch import Sketch
from edgert.telemetry.spans import STAGES
from tests.support.sketches import sketch_of

SHAPES = 50
REQUESTS_A_WINDOW = 300
CONNECTS_AT_ONCE = 200
DRAIN_EVERY_S = 0.02
PROFILES = ("raspberry-pi-4", "raspberry-pi-5", "intel-nuc", "jetson-orin-nano")
_SEQ, _REQUESTS = 9_007_199_254_740_001, 9_007_199_254_740_002  # placeholders in templates


@dataclass
class Template:
    """A payload with two placeholders for numbers."""

    parts: tuple[bytes, bytes, bytes]

    @classmethod
    def of(cls, fields: dict[str, object]) -> Template:
        head, rest = messages.dump(fields).split(str(_SEQ).encode())
        middle, _, tail = rest.partition(str(_REQUESTS).encode())
        return cls((head, middle, tail))

    def filled(self, seq: int, requests: int) -> bytes:
        head, middle, tail = self.parts
        return b"%b%d%b%d%b" % (head, seq, middle, requests, tail) if tail else b"%b%d%b" % (head, seq, middle)


@dataclass
class Load:
    """`devices` of them, `models` each, on the broker at `port`."""

    port: int
    devices: int
    models: int
    sites: int = 10
    reports_sent: int = 0
    acknowledged_bytes: int = 0
    _sockets: list[socket.socket] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _window: int = 0

    def __post_init__(self) -> None:
        dice = np.random.default_rng(7)
        self._shapes = [self._shape(dice, n) for n in range(SHAPES)]
        self._poll = select.epoll()
        self._drained_at = 0.0
        self._names = [Topics(f"site-{n % self.sites}", f"d-{n:06}") for n in range(self.devices)]

    @property
    def payload_bytes(self) -> dict[str, int]:
        """The mean size of each report's payload."""
        sizes = [[len(template.filled(1, REQUESTS_A_WINDOW)) for template in shape] for shape in self._shapes]
        return dict(zip(("hist", "metrics"), np.mean(sizes, axis=0).round().astype(int).tolist(), strict=True))

    def connect(self) -> None:
        """Connect every device and publish its status."""
        for first in range(0, self.devices, CONNECTS_AT_ONCE):
            some = range(first, min(first + CONNECTS_AT_ONCE, self.devices))
            for n in some:
                link = socket.create_connection(("127.0.0.1", self.port))
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(_connect(self._names[n].client_id))
                self._sockets.append(link)
                self._numbers.append(0)
            for n in some:
                assert self._sockets[n].recv(4)[:2] == b"\x20\x02", "the broker accepted no connection; see its log"
                self._poll.register(self._sockets[n], select.EPOLLIN)
                said = messages.envelope(ts_ms=1, boot="b1") | {"profile": PROFILES[n % 4], "edgert": "0"}
                self._publish(n, self._names[n].info, messages.dump(said), 1, retain=True)
                self._publish(n, self._names[n].status, b"online", 1, retain=True)
            self._drain()

    def run(self, windows: int, window_s: float) -> float:
        """Send so many windows of every device, evenly spread; return how long it took in seconds."""
        self.reports_sent = 0
        began = time.perf_counter()
        for window in range(windows):
            self._window += 1
            for n in range(self.devices):
                due = began + (window + n / self.devices) * window_s
                while (early := due - time.perf_counter()) > 0:
                    self._drain(min(early, 0.01))
                self._report(n)
        self._drain()
        return time.perf_counter() - began

    def close(self) -> None:
        for link in self._sockets:
            link.close()

    def _report(self, n: int) -> None:
        topics, seq = self._names[n], self._window
        for model in range(self.models):
            hist, metrics = self._shapes[(n * 7 + model + seq) % SHAPES]
            self._publish(n, topics.metrics(f"m{model}"), metrics.filled(seq, seq * REQUESTS_A_WINDOW), 0)
            self._publish(n, topics.hist(f"m{model}"), hist.filled(seq, 0), 1)
            self.reports_sent += 2
        self._publish(n, topics.sys, b'{"v":1,"ts":1,"boot":"b1","uptime_s":1.0,"load_1m":0.1,"cpus":4}', 0)
        if time.perf_counter() - self._drained_at > DRAIN_EVERY_S:
            self._drain()

    def _publish(self, n: int, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        self._numbers[n] = self._numbers[n] % 65535 + 1
        number = self._numbers[n].to_bytes(2, "big") if qos else b""
        body = len(topic).to_bytes(2, "big") + topic.encode() + number + payload
        self._sockets[n].sendall(bytes([0x30 | qos << 1 | retain]) + _length(len(body)) + body)

    def _drain(self, timeout_s: float = 0.0) -> None:
        """Read acknowledgements from the sockets, because a broker stops reading from a client that does not."""
        self._drained_at = time.perf_counter()
        for descriptor, _ in self._poll.poll(timeout_s, 1024):
            self.acknowledged_bytes += len(socket.socket.recv(self._by_descriptor(descriptor), 4096))

    def _by_descriptor(self, descriptor: int) -> socket.socket:
        if not hasattr(self, "_descriptors"):
            self._descriptors: dict[int, socket.socket] = {}
        if descriptor not in self._descriptors:
            self._descriptors = {link.fileno(): link for link in self._sockets}
        return self._descriptors[descriptor]

    def _shape(self, dice: np.random.Generator, number: int) -> tuple[Template, Template]:
        sketch = sketch_of(dice.lognormal(1 + number / 50, 0.3, REQUESTS_A_WINDOW).tolist())
        common = messages.envelope(ts_ms=int(time.time() * 1000), boot="b1", seq=_SEQ) | {"window_s": 60.0}
        scalars = {"zero": 0, "count": sketch.count, "sum": sketch.sum, "min": sketch.min, "max": sketch.max}
        hist = {"unit": "ms", "temporality": "delta", "scale": 5, **scalars, "buckets": sketch.encode()}
        hist["stages"] = stages.text_of(stage_times(dice, 2.7 * 1.02**number))
        version = {"model_version": f"r{1 + number % 3}"}
        percentiles = {f"lat_{name}_ms": 12.3456 for name in ("p50", "p95", "p99", "p999", "max")}
        within = {f"lat_le_{bound}ms_total": 123456 for bound in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)}
        metrics = {
            "uptime_s": 1e6, "up": 1, "req_total": _REQUESTS, "err_total": 0, "shed_total": 0, "cache_hit_total": 0,
            **percentiles, "lat_sum_ms_total": 123456.789, **within, **{f"{name}_p99_ms": 1.2345 for name in STAGES},
            "batch_mean": 1.5, "clock_synced": 1, "rss_bytes": 123456789, "temp_c": 51.5, "throttled": 0,
        }  # fmt: skip
        return Template.of({**common, **hist, **version}), Template.of({**common, **metrics, **version})


def stage_times(dice: np.random.Generator, engine_ms: float) -> dict[str, Sketch]:
    """Return a window's stages, without preprocessing, in whole microseconds as devices measure them."""
    usual_us = {"decode": 12, "cache": 2, "queue": 40, "engine": 1000 * engine_ms, "encode": 25}
    times = {name: dice.lognormal(np.log(usual_us.get(name, 1e-3)), 0.4, REQUESTS_A_WINDOW) for name in STAGES}
    return {name: sketch_of((times_us.round() / 1000).tolist()) for name, times_us in times.items()}


def _connect(client_id: str) -> bytes:
    body = b"\x00\x04MQTT\x04\x02" + (600).to_bytes(2, "big") + len(client_id).to_bytes(2, "big") + client_id.encode()
    return b"\x10" + _length(len(body)) + body


def _length(value: int) -> bytes:
    out = bytearray()
    while True:
        value, digit = value >> 7, value & 0x7F
        out.append(digit | (0x80 if value else 0))
        if not value:
            return bytes(out)
