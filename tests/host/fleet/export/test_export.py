"""Exporters count each report once, and Prometheus reads true quantiles from them."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.telemetry import messages
from edgert.telemetry.messages import Topics
from edgert.telemetry.sketch import Sketch
from edgert_deploy.cli.fleet_export import export
from edgert_deploy.fleet.export import otlp
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.export.scrape import ScrapeServer
from tests.support.brokers import Broker, free_port, until
from tests.support.fleet import NOW_MS, Pi, Sent, publish, scraped

_MAIN = "import sys; from edgert_deploy.cli import main; sys.exit(main())"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker") as running:
        yield running


def an_exporter(by: str = "site,model,version,profile") -> Exporter:
    return Exporter("b1", tuple(by.split(",")), clock=lambda: 0.0, wall_clock=lambda: 1_790_000_000.0)


def feed(exporter: Exporter, sent: Sent) -> None:
    for topic, payload in sent:
        exporter.apply(topic, payload, False, 0.0)


def counted(exporters: list[Exporter]) -> tuple[Sketch, list[int]]:
    """What they hold together."""
    total, counters = Sketch(), [0, 0, 0, 0]
    for exporter in exporters:
        for group in exporter.groups.values():
            total.merge(group.latency)
            counters = [a + b for a, b in zip(counters, group.counters, strict=True)]
    return total, counters


# --- what counts ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_each_report_counts_once_however_often_it_comes(seed: int) -> None:
    dice = random.Random(seed)
    exporter, devices = an_exporter(), [Pi(f"pi-{n}") for n in range(3)]
    expected, reports = Sketch(), Sent()
    for pi in devices:
        for minute in range(6):
            reports += pi.window(NOW_MS + minute, [dice.uniform(1, 9)] * dice.randrange(5), errors=1, uptime_s=60 + 60 * minute)  # fmt: skip
            expected.merge(pi.sketches[-1][1])
    events = [
        (Topics("plant-a", "pi-0").event, messages.dump(messages.envelope(ts_ms=NOW_MS, boot="b1", seq=n) | {"event": "degraded", "model": f"m{n % 2}"}))
        for n in range(1, 5)
    ]  # fmt: skip
    for at, message in enumerate(reports + events):
        exporter.apply(*message, False, 0.0)
        if dice.random() < 0.3:
            exporter.apply(*dice.choice((reports + events)[max(0, at - 5) : at + 1]), False, 0.0)
    total, (requests, errors, _, _) = counted([exporter])
    assert total == expected
    assert (requests, errors) == (sum(pi.requests for pi in devices), sum(pi.errors for pi in devices))
    assert sum(exporter.events.values()) == 4
    assert (exporter.counting.missing, exporter.refused) == (0, 0)


def test_an_invalid_report_is_counted_and_does_no_harm() -> None:
    exporter = an_exporter()
    exporter.apply("edgert/v1/plant-a/pi-1/m/digits/hist", b"{}", False, 0.0)
    assert (exporter.refused, exporter.groups) == (1, {})


def test_a_repeated_report_counts_once_and_counters_survive_a_worker_s_restart() -> None:
    exporter, pi = an_exporter(by="device,model"), Pi("pi-1")
    pi.requests = 1000  # it ran before anyone listened
    sent = pi.window(NOW_MS, [1.0] * 5) + pi.window(NOW_MS, [1.0] * 7)
    pi.requests = 0
    sent += pi.window(NOW_MS, [1.0] * 2, uptime_s=20)
    feed(exporter, sent + sent)
    total, (requests, *_) = counted([exporter])
    assert (total.count, requests, exporter.counting.duplicates) == (14, 7 + 2, 6)


def test_counters_go_on_however_often_the_device_loses_its_spool_and_each_loss_shows() -> None:
    exporter, pi, answered = an_exporter(), Pi("pi-1"), 0
    for n, first in enumerate((0, 2**50, 2**40, 2**45)):
        pi.seq = first
        for _ in range(2):
            feed(exporter, pi.window(NOW_MS, [1.0] * 10, uptime_s=60 if n == 0 else 6000))
        answered += 20
        pi.window(NOW_MS, [1.0] * 10)  # lost with the spool, and part of what the counters say next
    total, (requests, *_) = counted([exporter])
    assert (total.count, requests, exporter.counting.missing) == (answered, 4 * 30 - 10, 3)


# --- what is drawn from it ------------------------------------------------------------------


def test_text_is_what_prometheus_own_client_reads_and_its_buckets_are_exact() -> None:
    exporter, pi = an_exporter(), Pi("pi-1", profile='a "quoted" \\ board')
    latencies = [random.Random(5).lognormvariate(1, 1) for _ in range(500)]
    feed(exporter, pi.info() + pi.window(NOW_MS, latencies, errors=2, uptime_s=60))
    read = {family.name: family for family in text_string_to_metric_families(Exposition(exporter).text())}
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in read["edgert_latency_milliseconds"].samples
        if sample.name.endswith("_bucket")
    }
    for bound, value in buckets.items():
        assert value == sum(latency <= bound for latency in latencies)
    (errors,) = read["edgert_errors"].samples
    assert (errors.value, errors.labels["profile"]) == (2, 'a "quoted" \\ board')
    assert read["edgert_device_online"].samples[0].value == 1


def test_one_device_with_an_odd_profile_does_not_keep_the_others_from_being_scraped() -> None:
    exporter, odd = an_exporter(), b"half a character \\ud800\\u0000" + b"x" * 30_000
    for pi in (Pi("pi-1"), Pi("pi-2", profile="odd")):
        said = [(topic, payload.replace(b"odd", odd)) for topic, payload in pi.info()]
        feed(exporter, said + pi.window(NOW_MS, [1.0], uptime_s=60))
    assert not exporter.refused
    text = Exposition(exporter).text().encode()
    assert b'device="pi-1"' in text
    assert max(map(len, text.splitlines())) < 1000
    assert Exposition(exporter).protobuf()


@contextmanager
def answering(said: bytes) -> Iterator[int]:
    """A port where whoever asks gets `said`, whatever it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


def test_a_scraper_that_hangs_up_is_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    exporter = an_exporter(by="device")
    for number in range(300):
        feed(exporter, Pi(f"pi-{number}").window(NOW_MS, [1.0]))
    server = ScrapeServer(Exposition(exporter), "127.0.0.1", 0)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a goodbye
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").status == 200
    server.close()
    assert capfd.readouterr().err == ""


def test_otlp_holds_the_same_histogram_and_what_an_endpoint_missed_comes_with_the_next_push() -> None:
    exporter, pi = an_exporter(), Pi("pi-1")
    feed(exporter, pi.info() + pi.window(NOW_MS, [0.0, 1.0, 1.5, 80.0, 80.0], errors=1, uptime_s=60))
    port = free_port()
    with pytest.raises(otlp.OtlpFailed, match="check that the collector runs"):
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
        with pytest.raises(otlp.OtlpFailed, match="404"):
            otlp.push(f"http://127.0.0.1:{port}/elsewhere", exporter, 2e9, {})
        thread.join(10)
    for odd in (b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"):
        with answering(odd) as port, pytest.raises(otlp.OtlpFailed, match="does not accept metrics"):
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


# --- the whole way: mosquitto, exporters in processes of their own, a real Prometheus ----------


@contextmanager
def exporter_process(broker: Broker, *words: str) -> Iterator[int]:
    """`edgert fleet export` on a free port; it must end with 0 when it is told to."""
    command = [sys.executable, "-c", _MAIN, "fleet", "export", "--broker", broker.settings.address]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"reads port (\d+)", line)
        assert found, line + process.stderr.read()
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(10) == 0, said


@contextmanager
def a_prometheus(folder: Path, ports: list[int]) -> Iterator[str]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    port = free_port()
    folder.mkdir()
    targets = [f"127.0.0.1:{target}" for target in ports]
    configuration = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "edgert", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=native-histograms"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([binary, *words], stdout=log, stderr=log)
    try:
        until(lambda: ready(f"http://127.0.0.1:{port}/-/ready"), f"Prometheus answers; see {folder}/log", 60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def promql(server: str, expression: str) -> float | None:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=10) as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def test_prometheus_reads_the_quantiles_of_the_pooled_requests_from_the_exporters_of_two_sites(
    broker: Broker, tmp_path: Path
) -> None:
    dice = random.Random(11)
    fleet = [Pi(f"pi-{n}", version=f"r{1 + n % 2}", site=f"plant-{'ab'[n // 3]}") for n in range(6)]
    pooled: dict[str, list[float]] = {"r1": [], "r2": []}
    reports: Sent = []
    for n, pi in enumerate(fleet):
        for minute in range(5):
            latencies = [dice.lognormvariate(1 + 0.7 * n, 0.6) for _ in range(400)]
            pooled[pi.version] += latencies
            reports += pi.window(NOW_MS + minute, latencies, errors=1, uptime_s=60.0 * (minute + 1))
    total = sum(map(len, pooled.values()))
    with exporter_process(broker, "--site", "plant-a") as one, exporter_process(broker, "--site", "plant-b") as two:
        publish(broker, [message for pi in fleet for message in pi.info()], retain=True)
        publish(broker, reports)
        publish(broker, reports[:20])  # as after a reconnect

        def arrived() -> bool:
            return sum(scraped(port, "edgert_latency_milliseconds_count") for port in (one, two)) >= total

        until(arrived, "all reports are counted", 20.0)
        with a_prometheus(tmp_path / "prometheus", [one, two]) as server:
            count = "sum(histogram_count(edgert_latency_milliseconds))"
            until(lambda: promql(server, count) == total, "Prometheus has scraped all histograms", 30.0)
            until(lambda: promql(server, "sum(edgert_requests_total)") == total + 30, "and all counters", 30.0)
            for version, sample in pooled.items():
                ordered = sorted(sample)
                for share in (0.5, 0.9, 0.99):
                    exact = ordered[math.ceil(share * len(ordered)) - 1]
                    merged = f'sum(edgert_latency_milliseconds{{version="{version}"}})'
                    assert promql(server, f"histogram_quantile({share}, {merged})") == pytest.approx(exact, rel=0.011)
            assert promql(server, "sum(edgert_errors_total)") == 30
            assert promql(server, "sum(edgert_device_online)") == 6, "one exporter has each device"
        kinds = ("hist", "metrics")
        handed = [
            sum(scraped(port, "edgert_exporter_messages_total", kind=kind) for kind in kinds) for port in (one, two)
        ]
        assert min(handed) > 0, "each has one site"
        assert sum(handed) == len(reports) + 20
        assert sum(scraped(port, "edgert_exporter_duplicates_total") for port in (one, two)) == 20


def test_an_exporter_survives_the_broker_s_restart_and_shows_gauges_by_device(broker: Broker) -> None:
    pi = Pi("pi-1")
    first = pi.window(NOW_MS, [1.0] * 4, uptime_s=60)
    with exporter_process(broker, "--by", "site,device,model") as port:
        publish(broker, first)
        until(lambda: scraped(port, "edgert_requests_total", device="pi-1") == 4, "the first report is counted")
        broker.stop()
        broker.start()
        topic, payload = pi.window(NOW_MS, [1.0] * 3)[1]
        again = (topic, messages.dump(json.loads(payload) | {"temp_c": 61.5}))

        def counted() -> bool:
            publish(broker, [first[1], again])
            return scraped(port, "edgert_requests_total", device="pi-1") == 7

        until(counted, "a report after the restart is counted")
        assert scraped(port, "edgert_temperature_celsius", device="pi-1") == 61.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--by", "colour"), "known: site, device"),
        (("--otlp", "collector:4318"), "http://HOST:4318"),
        (("--listen", "nowhere.invalid:1"), "choose another port"),
        (("--site", "a/b"), "cannot be part of an MQTT topic"),
    ],
)
def test_words_that_cannot_be_used_are_explained(words: tuple[str, ...], said: str) -> None:
    error = CliRunner().invoke(export, ["--broker", "127.0.0.1:1", *words]).exception
    assert isinstance(error, ConfigInvalid)
    assert said in error.message


def test_a_broker_that_is_not_there_is_an_error() -> None:
    error = CliRunner().invoke(export, ["--broker", f"127.0.0.1:{free_port()}", "--listen", "127.0.0.1:0"]).exception
    assert isinstance(error, EdgeRTError)
    assert error.exit_code == 6
