"""OTLP sends the same histograms. An endpoint that was down for a while misses no counts."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from edgert_deploy.fleet.export import otlp
from edgert_deploy.fleet.export.post import PushFailed
from tests.support.devices import WAIT_S_MAX
from tests.support.fleet import NOW_MS, Pi, an_exporter, feed
from tests.support.servers.ports import free_port


@contextmanager
def answering(said: bytes) -> Iterator[int]:
    """Open a port that answers every request with `said`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join(WAIT_S_MAX)


def test_otlp_contains_the_same_histogram_and_a_push_repeats_what_an_endpoint_missed() -> None:
    exporter, pi = an_exporter(), Pi("pi-1")
    feed(exporter, pi.info() + pi.window(NOW_MS, [0.0, 1.0, 1.5, 80.0, 80.0], errors=1, uptime_s=60, queue=[2.0, 2.0]))
    port = free_port()
    with pytest.raises(PushFailed, match="check that it runs"):
        otlp.push(f"http://127.0.0.1:{port}/v1/metrics", exporter, 2e9, {})
    received: list[tuple[str | None, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.headers["X-Key"], gzip.decompress(body)))
            self.send_response(200 if self.path == "/v1/metrics" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", port), Collector) as server:

        def answer_twice() -> None:
            for _ in range(2):
                server.handle_request()

        thread = threading.Thread(target=answer_twice)
        thread.start()
        otlp.push(otlp.endpoint(f"http://127.0.0.1:{port}"), exporter, 2e9, {"X-Key": "secret"})
        with pytest.raises(PushFailed, match="404"):
            otlp.push(f"http://127.0.0.1:{port}/elsewhere", exporter, 2e9, {})
        thread.join(WAIT_S_MAX)
    for odd in (b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"):
        with answering(odd) as port, pytest.raises(PushFailed, match="does not accept metrics"):
            otlp.push(f"http://127.0.0.1:{port}/v1/metrics", exporter, 2e9, {})
    key, body = received[0]
    asked = ExportMetricsServiceRequest.FromString(body)
    metrics = {metric.name: metric for metric in asked.resource_metrics[0].scope_metrics[0].metrics}
    (point,) = metrics["edgert_latency"].exponential_histogram.data_points
    (sketch,) = (sketch for _, sketch in pi.sketches)
    buckets = {point.positive.offset + n: count for n, count in enumerate(point.positive.bucket_counts) if count}
    assert (key, buckets, point.scale, point.zero_count) == ("secret", sketch.buckets, 5, 1)
    assert (point.count, point.sum, point.max) == (5, pytest.approx(162.5), 80.0)
    assert {each.key: each.value.string_value for each in point.attributes}["profile"] == "pi"
    assert metrics["edgert_errors"].sum.data_points[0].as_double == 1
    assert metrics["edgert_errors"].sum.is_monotonic
    (stage,) = metrics["edgert_stage"].exponential_histogram.data_points
    assert (stage.count, {each.key: each.value.string_value for each in stage.attributes}["stage"]) == (2, "queue")


def test_a_redirection_is_an_error_that_names_its_target_and_gets_no_credentials() -> None:
    """Otherwise, a login page that answers 200 would look like a collector."""
    with socket.create_server(("127.0.0.1", 0)) as login:
        login.settimeout(0.2)
        aim = f"http://127.0.0.1:{login.getsockname()[1]}/login"
        for status in (b"301 Moved Permanently", b"302 Found", b"307 Temporary Redirect"):
            said = b"HTTP/1.1 " + status + b"\r\nLocation: " + aim.encode() + b"\r\nContent-Length: 0\r\n\r\n"
            with answering(said) as port, pytest.raises(PushFailed, match=f"leads to {aim}") as failed:
                otlp.push(f"http://127.0.0.1:{port}/v1/metrics", an_exporter(), 2e9, {"Authorization": "secret"})
            assert failed.value.retryable
        with pytest.raises(TimeoutError):
            login.accept()
