"""The example configurations work in the real tools: mosquitto, promtool, mqtt-exporter, mqtt2prometheus, Node.js."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgert.telemetry import messages
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import Connection, MqttSettings
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import NOW_MS, Pi, publish
from tests.support.paths import ROOT
from tests.support.servers.brokers import Broker, mosquitto
from tests.support.servers.ports import free_port

MQTT_EXPORTER = "mqtt-exporter==1.12.1"
FOLDER = ROOT / "examples" / "telemetry"


def tool(name: str, install: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: {install}")
    return path


# --- the broker's access list ---------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Broker]:
    """Run a mosquitto with the shipped access list and one password for all users."""
    folder = tmp_path / "broker"
    folder.mkdir()
    for user in ("pi-07", "ops"):
        words = [mosquitto("mosquitto_passwd"), "-b", *(() if (folder / "users").exists() else ("-c",))]
        subprocess.run([*words, str(folder / "users"), user, f"pw-{user}"], check=True, capture_output=True)
        (folder / f"{user}.pw").write_text(f"pw-{user}\n")
    shutil.copy(FOLDER / "mosquitto.acl", folder / "acl")
    (folder / "acl").chmod(0o600)
    extra = (f"password_file {folder}/users", f"acl_file {folder}/acl", "allow_anonymous false")
    broker = Broker(folder, extra=extra)
    broker._lines = lambda: [f"listener {broker.port} 127.0.0.1", "user root", "persistence false", *extra]  # type: ignore[method-assign]
    with broker:
        yield broker


def as_user(broker: Broker, user: str) -> MqttSettings:
    return replace(broker.settings, username=user, password_file=str(broker.folder / f"{user}.pw"))


def taken(broker: Broker, user: str, topic: str) -> bool:
    """Return whether the broker accepts a message of `user` for `topic`."""
    answers: list[str | None] = []
    connection = Connection(as_user(broker, user), on_acknowledged=lambda _, refused: answers.append(refused))
    connection.open()
    connection.publish(topic, b"online", 1)
    while not answers:
        connection.pump(0.05)
    connection.close()
    return answers == [None]


def test_a_device_writes_only_its_own_topics_and_only_readers_may_read(guarded: Broker) -> None:
    own, other, elsewhere = Topics("plant-a", "pi-07"), Topics("plant-a", "pi-08"), Topics("plant-b", "pi-07")
    assert taken(guarded, "pi-07", own.status)
    assert taken(guarded, "pi-07", own.hist("digits"))
    assert not taken(guarded, "pi-07", other.status)
    assert not taken(guarded, "pi-07", elsewhere.status)
    assert not taken(guarded, "ops", own.status)
    heard: dict[str, list[str]] = {user: [] for user in ("ops", "pi-07")}
    connections = []
    for user, topics in heard.items():
        listening = Connection(as_user(guarded, user), on_message=lambda topic, _p, _r, to=topics: to.append(topic))  # type: ignore[misc]
        listening.open()
        listening.subscribe(("edgert/v1/#",), 1)
        connections.append(listening)
    taken(guarded, "pi-07", own.status)

    def arrived() -> bool:
        for connection in connections:
            connection.pump(0.05)
        return bool(heard["ops"])

    wait_until(arrived, "readers receive it")
    assert heard["pi-07"] == [], "a device reads nothing, not even its own messages"
    for connection in connections:
        connection.close()


def test_mosquitto_accepts_the_configuration(tmp_path: Path) -> None:
    text = (FOLDER / "mosquitto.conf").read_text()
    with Broker.in_folder(tmp_path / "b", secured=True) as secured:
        folder = secured.folder
        for shipped, here in (
            ("/etc/mosquitto/certs/server.pem", f"{folder}/server.pem"),
            ("/etc/mosquitto/certs/server.key", f"{folder}/server.key"),
            ("/etc/mosquitto/passwd", f"{folder}/users"),
            ("/etc/mosquitto/acl", str(FOLDER / "mosquitto.acl")),
        ):
            assert shipped in text
            text = text.replace(shipped, here)
        again = Broker(tmp_path / "shipped", secured=True)
        again.folder.mkdir()
        text = text.replace("listener 8883", f"listener {again.port} 127.0.0.1")
        again._lines = lambda: ["user root", f"persistence_location {again.folder}/", *text.splitlines()]  # type: ignore[method-assign]
        with again:
            connection = Connection(replace(secured.settings, port=again.port))
            connection.open()
            connection.close()


# --- Prometheus and Grafana -----------------------------------------------------------------


def test_prometheus_accepts_the_rules_and_the_tests_of_the_alerts_pass() -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    checks = (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml"), ("test", "rules", "slo_test.yml"))  # fmt: skip
    for words in checks:
        done = subprocess.run([promtool, *words], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_is_valid_and_names_series_of_the_exporter(tmp_path: Path) -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["expr"] for each in dashboard["annotations"]["list"]]
    rules = [
        {"record": f"q{n}", "expr": query.replace("$__rate_interval", "5m")} for n, query in enumerate(queries)
    ]  # fmt: skip
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    served = set(re.findall(r"`(edgert_\w+)`", (FOLDER.parents[1] / "docs" / "fleet.md").read_text()))
    asked = {name for text in [*queries, (FOLDER / "alerts.yml").read_text(), (FOLDER / "slo.yml").read_text()] for name in re.findall(r"edgert_\w+", text)}  # fmt: skip
    assert {name for name in asked if not name.startswith("edgert_exporter_")} <= served


# --- other readers of the flat JSON ---------------------------------------------------------


@pytest.fixture(scope="module")
def mqtt_exporter() -> str:
    """Return mqtt-exporter in its own environment, because it pins its requirements; kept from run to run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgert-test" / MQTT_EXPORTER
    program = folder / "bin" / "mqtt-exporter"
    if not program.exists():
        for words in ([sys.executable, "-m", "venv", str(folder)], [str(folder / "bin" / "pip"), "install", "-q", MQTT_EXPORTER]):  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{MQTT_EXPORTER} cannot be installed here: {done.stderr.strip()[-200:]}")
    return str(program)


def shown(words: list[str], port: int, topic: str, log: Path, names: list[str], **environment: str) -> list[float]:
    """Return the metrics `names` that an exporter at `port` shows of the device that reports at `topic`."""
    found: dict[str, float] = {}
    flat = topic.replace("/", "_")  # as mqtt-exporter writes it

    def read() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S_MAX) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                samples = [sample for family in families for sample in family.samples]
        except OSError:
            return False
        named = [sample for sample in samples if sample.labels.get("topic", "").replace("/", "_") == flat]
        found.update({sample.name: sample.value for sample in named})
        return found.keys() >= set(names)  # an exporter sets one metric after the other

    with open(log, "wb") as said:
        process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=said, stderr=said)
    try:
        wait_until(read, f"the device is shown; see {log}")
    finally:
        process.terminate()
        process.wait(WAIT_S_MAX)
    return [found[name] for name in names]


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[tuple[Broker, str]]:
    """Run a broker and a device that reports again and again.

    An exporter sees only messages that arrive while it runs.
    """
    pi, stop = Pi("pi-07"), threading.Event()
    sent = pi.window(NOW_MS, [2.0] * 5, errors=1)
    fields = json.loads(sent[1][1]) | {"temp_c": 51.5, "lat_p99_ms": 2.02}

    def report(broker: Broker) -> None:
        while not stop.wait(0.2):
            publish(broker, [(sent[1][0], messages.dump(fields))])

    with Broker.in_folder(tmp_path / "broker") as broker:
        thread = threading.Thread(target=report, args=(broker,))
        thread.start()
        try:
            yield broker, sent[1][0]
        finally:
            stop.set()
            thread.join(WAIT_S_MAX)


def test_mqtt_exporter_shows_the_metrics_of_a_device(
    mqtt_exporter: str, reporting: tuple[Broker, str], tmp_path: Path
) -> None:
    lines = (FOLDER / "mqtt-exporter.env").read_text().splitlines()
    said = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    broker, topic = reporting
    said |= {"MQTT_PORT": str(broker.port), "PROMETHEUS_PORT": str(port := free_port())}
    names = ["edgert_device_req_total", "edgert_device_temp_c"]
    assert shown([mqtt_exporter], port, topic, tmp_path / "log", names, **said) == [6, 51.5]


def test_mqtt2prometheus_shows_the_metrics_of_a_device(reporting: tuple[Broker, str], tmp_path: Path) -> None:
    exporter = tool("prometheus-mqtt-exporter", "apt-get install prometheus-mqtt-exporter")
    broker, topic = reporting
    text = (FOLDER / "mqtt2prometheus.yml").read_text()
    assert "tcp://127.0.0.1:1883" in text
    (tmp_path / "config.yml").write_text(text.replace(":1883", f":{broker.port}"))
    words = [exporter, "-config", str(tmp_path / "config.yml"), "-listen-address", "127.0.0.1", "-listen-port"]
    metrics = ("requests_total", "errors_total", "latency_p99_milliseconds", "temperature_celsius")
    names = [f"edgert_device_{name}" for name in metrics]
    assert shown([*words, str(port := free_port())], port, topic, tmp_path / "log", names) == [6, 1, 2.02, 51.5]


def test_the_node_red_flow_reports_errors_and_slow_windows_and_crashes(tmp_path: Path) -> None:
    node = tool("node", "apt-get install nodejs")
    flow: list[dict[str, Any]] = json.loads((FOLDER / "node-red-flow.json").read_text())
    nodes = {entry["id"]: entry for entry in flow}
    assert all(target in nodes for entry in flow for wires in entry.get("wires", []) for target in wires)
    pi = Pi("pi-07")
    metrics = []
    for errors, p99 in ((1, 9.0), (2, 9.0), (0, 9.0), (0, 80.0)):
        topic, payload = pi.window(NOW_MS, [1.0], errors=errors)[1]
        metrics.append((topic, json.loads(payload) | {"lat_p99_ms": p99}))
    fields = messages.envelope(ts_ms=NOW_MS, boot="b1", seq=4) | {"event": "crashed", "reason": "signal 11"}
    cases = {
        "edgert-came": [(pi.topics.status, word) for word in ("online", "online", "lost")],
        "edgert-errors": metrics,
        "edgert-said": [(pi.topics.event, fields)] * 2,
    }
    program = """
        const cases = JSON.parse(require('fs').readFileSync(0)), out = {};
        for (const [id, {func, sent}] of Object.entries(cases)) {
            const kept = {}, context = {get: k => kept[k], set: (k, v) => { kept[k] = v; }};
            const run = new Function('msg', 'context', func);
            out[id] = sent.map(([topic, payload]) => run({topic, payload}, context)).filter(m => m).map(m => m.payload);
        }
        console.log(JSON.stringify(out));"""
    given = {name: {"func": nodes[name]["func"], "sent": sent} for name, sent in cases.items()}
    done = subprocess.run([node, "-e", program], input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "edgert-came": ["plant-a/pi-07 is online", "plant-a/pi-07 is lost"],
        "edgert-errors": [
            "plant-a/pi-07 digits r1: 2 errors, p99 9 ms",
            "plant-a/pi-07 digits r1: 0 errors, p99 80 ms",
        ],
        "edgert-said": ["plant-a/pi-07  crashed: signal 11"],
    }
