"""From a request to the percentiles of the fleet: a real daemon, its spool and forwarder, mosquitto, `edgert fleet
watch`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import DeadlineExceeded
from edgert.telemetry.mqtt import Connection
from hil.support.relay import Relay
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until
from tests.support.servers.brokers import USER, Broker
from tests.support.servers.ports import free_port

ITEM = np.ones((1, 4), np.float32)


def mqtt_config(broker: Broker, port: int = 0) -> str:
    """Return the `[mqtt]` table for a broker with TLS and passwords; `port` overrides the port."""
    folder = broker.folder
    return f"""
[serving]
window_s = 0.5
[mqtt]
host = "localhost"
port = {port or broker.port}
tls = true
ca = "{folder / "ca.pem"}"
username = "{USER}"
password_file = "{folder / "password"}"
"""


def watch_words(broker: Broker, seconds: float) -> list[str]:
    """Return `edgert fleet watch --json` as a command."""
    words = ["fleet", "watch", "--broker", f"localhost:{broker.port}", "--tls", "--ca", broker.folder / "ca.pem"]
    login = ["--username", USER, "--password-file", broker.folder / "password", "--json", "--for", f"{seconds}s"]
    return [sys.executable, "-m", "edgert_deploy.cli", *map(str, (*words, *login))]


def watch(broker: Broker, seconds: float) -> list[dict[str, Any]]:
    """Run `edgert fleet watch`; return its output."""
    done = subprocess.run(watch_words(broker, seconds), capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def asked_all_the_time(device: Device) -> Iterator[None]:
    """Run an app that keeps sending requests, so that every window has a report."""
    over = threading.Event()

    def ask() -> None:
        with device.client() as client:
            while not over.is_set():
                client.infer("echo", ITEM, cache=False)

    app = threading.Thread(target=ask)
    app.start()
    try:
        yield
    finally:
        over.set()
        app.join()


@contextmanager
def heard_from(broker: Broker, topics: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of `topics` so far. A thread receives them, so the connection lasts while the test waits."""
    heard: list[dict[str, Any]] = []
    over = threading.Event()
    connection = Connection(
        broker.settings, on_message=lambda topic, said, _: heard.append({"topic": topic, **loads(said)})
    )
    connection.open()
    connection.subscribe((topics,), 1)

    def listen() -> None:
        while not over.is_set():
            connection.pump(0.1)
        connection.close()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield heard
    finally:
        over.set()
        listener.join()


def of_device(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with this device's latency; the other rows sum up the fleet."""
    return [row for row in rows if row["device"] == "d-test" and row["model"] == "echo" and row["p50_ms"]]


def test_the_percentiles_of_the_fleet_include_the_requests_of_a_device(tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker", secured=True) as broker, a_device(mqtt_config(broker)) as device:
        device.put(delay_s=0.02)
        seen: list[dict[str, Any]] = []

        def reported() -> bool:
            seen.extend(watch(broker, 2.0))
            return bool(of_device(seen))

        with asked_all_the_time(device):
            wait_until(reported, "the device's percentiles arrive")
        row = of_device(seen)[-1]
        assert row["state"] == "online"
        assert 20.0 <= row["p50_ms"] < 1000 * WAIT_S_MAX
        assert row["model_version"] == "r1"


def test_an_alarm_is_visible_to_later_subscribers_and_events_name_their_version(tmp_path: Path) -> None:
    alarms = "[alarms]\nworker_mb = 1\n"  # every worker uses more
    with (
        Broker.in_folder(tmp_path / "broker", secured=True) as broker,
        heard_from(broker, "edgert/v1/#") as heard,
        a_device(mqtt_config(broker) + alarms) as device,
    ):
        device.put()
        wait_until(lambda: any(said.get("echo_alarms") == "worker_mb" for said in heard), "the alarm is retained")
        shown: list[dict[str, Any]] = []

        def is_shown() -> bool:
            shown.extend(row for row in watch(broker, 2.0) if row["device"] == "d-test" and row["alarms"])
            return bool(shown)

        wait_until(is_shown, "somebody who looks later sees the alarm")
        assert shown[0]["alarms"] == ["worker_mb"]
        wait_until(lambda: any(said.get("alarms") == 1 for said in heard), "metrics")
        (metrics, *_) = (said for said in heard if said.get("alarms") == 1)
        assert metrics["alarm_worker_mb"] > 1
        assert {said["model_version"] for said in heard if said.get("event") == "serving"} == {"r1"}


def test_requests_of_checks_and_of_benchmarks_and_of_clients_that_time_out_are_counted_apart(tmp_path: Path) -> None:
    with (
        Broker.in_folder(tmp_path / "broker", secured=True) as broker,
        heard_from(broker, "edgert/v1/+/+/m/#") as heard,
        a_device(mqtt_config(broker)) as device,
    ):
        device.deploy()
        device.deploy(model="slow", delay_s=1.5)
        device.run("bench", "--model", "echo", "--for", "1s", "--clients", "2")
        with device.client() as client:
            for _ in range(3):
                client.infer("echo", ITEM, cache=False)
        asked = gone = 0
        while gone < 2:  # a client that is halted for a second still gets its answer
            with device.client() as client:
                client.infer("slow", ITEM, cache=False)  # now the client is connected, and the engine is free
                asked += 2
                try:
                    client.infer("slow", ITEM, cache=False, timeout_s=0.7)
                except DeadlineExceeded:
                    gone += 1

        def last(model: str) -> dict[str, Any]:
            said = [said for said in heard if said["topic"].endswith(f"/{model}/metrics")]
            return said[-1] if said else {"req_total": 0}

        wait_until(lambda: last("slow")["req_total"] >= asked and last("echo")["req_total"] >= 3, "all")
        names = ("req_total", "gone_total", "err_total", "shed_total")
        assert [last("slow")[name] for name in names] == [asked, 2, 0, 0]
        assert [last("echo")[name] for name in names] == [3, 0, 0, 0]
        assert last("echo")["probe_total"] > 100  # the requests of the check and the benchmark


def loads(payload: bytes) -> dict[str, Any]:
    """Return the fields of a message; no fields for a plain word."""
    fields: dict[str, Any] = json.loads(payload) if payload.startswith(b"{") else {}
    return fields


def test_without_a_broker_the_device_serves_and_no_report_is_lost(tmp_path: Path) -> None:
    """The device reaches the broker only once `edgert fleet watch` listens: no report waits there."""
    broker, port = Broker.in_folder(tmp_path / "broker", secured=True, extra=("log_type all",)), free_port()
    with broker, a_device(mqtt_config(broker, port)) as device:
        device.put()
        with device.client() as client:
            for i in range(50):
                assert client.infer("echo", ITEM * i)["y"].tolist() == (ITEM * i).tolist()
        wait_until(lambda: "no broker answers" in device.log(), "the device finds no broker")
        with subprocess.Popen(watch_words(broker, 120.0), stdout=subprocess.PIPE, text=True) as watching:
            try:
                log = broker.folder / "mosquitto.log"
                wait_until(lambda: "Sending SUBACK" in log.read_text(), "somebody listens")
                assert watching.stdout is not None
                with Relay(broker.port, port=port):
                    rows = (json.loads(line) for line in watching.stdout)
                    spooled = next((row for row in rows if of_device([row])), None)
            finally:
                watching.kill()
        assert spooled is not None, "what was spooled meanwhile arrives"
        assert spooled["answered"] >= 50
