"""`edgert fleet export` with a real mosquitto and a real Prometheus: true quantiles, restarts, messages."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.telemetry import messages
from edgert_deploy.cli.fleet.export import export, otlp_headers
from tests.support.devices import wait_until
from tests.support.fleet import NOW_MS, Pi, Sent, publish, scraped
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port
from tests.support.servers.prometheus import exporter_process, prometheus, promql


def scraping(ports: list[int], late: str = "") -> str:
    """Return a configuration of Prometheus that scrapes `ports` and accepts points that are `late`."""
    targets = [f"127.0.0.1:{target}" for target in ports]
    configuration: dict[str, Any] = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "edgert", "static_configs": [{"targets": targets}]}],
    }
    if late:
        configuration["storage"] = {"tsdb": {"out_of_order_time_window": late}}
    return json.dumps(configuration)  # JSON is YAML


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
        publish(broker, reports[:20])  # devices send reports again after a reconnect

        def arrived() -> bool:
            return sum(scraped(port, "edgert_latency_milliseconds_count") for port in (one, two)) >= total

        wait_until(arrived, "all reports are counted")
        with prometheus(tmp_path / "prometheus", scraping([one, two])) as server:
            count = "sum(histogram_count(edgert_latency_milliseconds))"
            wait_until(lambda: promql(server, count) == total, "Prometheus has scraped all histograms")
            wait_until(lambda: promql(server, "sum(edgert_requests_total)") == total + 30, "and all counters")
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


def test_late_reports_have_their_own_time_in_prometheus(broker: Broker, tmp_path: Path) -> None:
    now_ms = time.time_ns() // 1_000_000 // 60_000 * 60_000
    steady, away = Pi("pi-1"), Pi("pi-2")
    words = ("--web.enable-remote-write-receiver",)
    with prometheus(tmp_path / "prometheus", scraping([], late="1d"), *words) as server:
        with exporter_process(broker, "--remote-write", server):
            publish(broker, steady.info() + away.info(), retain=True)
            for minute in range(10, -1, -1):
                publish(broker, steady.window(now_ms - minute * 60_000, [2.0] * 60, uptime_s=660.0 - 60 * minute))
            requests = 'edgert_requests_total{job="edgert-reports",device="pi-%d"}'
            wait_until(lambda: promql(server, requests % 1 + f" @ {now_ms / 1000}") is not None, "the steady device")
            for minute in range(150, -1, -1):  # the reports of an outage arrive at once
                publish(broker, away.window(now_ms - minute * 60_000, [8.0] * 30, 30, 9060.0 - 60 * minute))
            wait_until(lambda: promql(server, requests % 2, now_ms / 1000) == 151 * 60, "the device that was away")
            total = "sum(histogram_count(edgert_latency_milliseconds))"
            wait_until(lambda: promql(server, total, now_ms / 1000) == 11 * 60 + 151 * 30, "all histograms")
        for minute in (2, 20, 35, 100, 145):  # one request a second during the whole time
            at_s = now_ms / 1000 - minute * 60
            assert promql(server, f"rate({requests % 2}[3m])", at_s) == pytest.approx(1.0, rel=0.02), minute
            errors = requests.replace("requests", "errors")
            assert promql(server, f"rate({errors % 2}[3m])", at_s) == pytest.approx(0.5, rel=0.02), minute
            if minute > 60:
                continue  # this Prometheus refuses histograms that are more than an hour late
            latency = 'edgert_latency_milliseconds{device="pi-2"}'
            assert promql(server, f"histogram_count(increase({latency}[3m]))", at_s) == pytest.approx(90, rel=0.02)
            assert promql(server, f"histogram_quantile(0.5, rate({latency}[3m]))", at_s) == pytest.approx(8, rel=0.02)
        assert promql(server, f"rate({requests % 1}[3m])", now_ms / 1000 - 20 * 60) is None


def test_an_exporter_survives_a_restart_of_the_broker_and_shows_gauges_by_device(broker: Broker) -> None:
    pi = Pi("pi-1")
    first = pi.window(NOW_MS, [1.0] * 4, uptime_s=60)
    with exporter_process(broker, "--by", "site,device,model") as port:
        publish(broker, first)
        wait_until(lambda: scraped(port, "edgert_requests_total", device="pi-1") == 4, "the first report is counted")
        broker.stop()
        broker.start()
        topic, payload = pi.window(NOW_MS, [1.0] * 3)[1]
        again = (topic, messages.dump(json.loads(payload) | {"temp_c": 61.5}))

        def counted() -> bool:
            publish(broker, [first[1], again])
            return scraped(port, "edgert_requests_total", device="pi-1") == 7

        wait_until(counted, "a report after the restart is counted")
        assert scraped(port, "edgert_temperature_celsius", device="pi-1") == 61.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--by", "colour"), "known: site, device"),
        (("--otlp", "collector:4318"), "http://HOST:4318"),
        (("--listen", "nowhere.invalid:1"), "choose another address or port"),
        (("--site", "a/b"), "cannot be part of an MQTT topic"),
    ],
)
def test_invalid_words_are_explained(words: tuple[str, ...], said: str) -> None:
    error = CliRunner().invoke(export, ["--broker", "127.0.0.1:1", *words]).exception
    assert isinstance(error, ConfigInvalid)
    assert said in error.message


def test_a_missing_broker_is_an_error() -> None:
    error = CliRunner().invoke(export, ["--broker", f"127.0.0.1:{free_port()}", "--listen", "127.0.0.1:0"]).exception
    assert isinstance(error, EdgeRTError)
    assert error.exit_code == 6


def test_headers_are_percent_encoded_as_in_opentelemetry() -> None:
    assert otlp_headers("Authorization=Basic%20YTpi, x-scope=a%2Cb=") == {
        "Authorization": "Basic YTpi",
        "x-scope": "a,b=",
    }
