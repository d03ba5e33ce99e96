"""The shipped rules, routes, groups and inhibitions, from devices to a webhook: real Prometheus, real Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import NOW_MS, Pi, publish, scraped
from tests.support.paths import ROOT
from tests.support.servers.brokers import Broker
from tests.support.servers.prometheus import alertmanager, exporter_process, prometheus, promql, receiver

FOLDER = ROOT / "examples" / "telemetry"
Heard = list[tuple[str, bytes]]


def shipped(name: str, *replaced: tuple[str, str]) -> str:
    """Return an example with all of its waits cut to a second, and with the addresses of this test."""
    text = (FOLDER / name).read_text()
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return re.sub(r"\b(for|scrape_interval|evaluation_interval|group_wait|group_interval): \d+[smh]", r"\1: 1s", text)


def notifications(heard: Heard) -> list[tuple[str, dict[str, Any]]]:
    return [(path, json.loads(body)) for path, body in heard]


def told(heard: Heard, path: str, status: str, alert: str) -> set[tuple[str, str]]:
    """Return (site, device) of the alerts of one name that a receiver was told of."""
    alerts = (each for to, message in notifications(heard) if to == path for each in message["alerts"])
    labels = (each["labels"] for each in alerts if each["status"] == status and each["labels"]["alertname"] == alert)
    return {(each.get("site", ""), each.get("device", "")) for each in labels}


def suppressed(manager: str) -> set[tuple[str, str, bool]]:
    """Return (alert, device, whether by a silence) of what Alertmanager holds back."""
    with urllib.request.urlopen(f"{manager}/api/v2/alerts", timeout=WAIT_S_MAX) as answer:
        alerts = json.load(answer)
    return {
        (each["labels"]["alertname"], each["labels"].get("device", ""), bool(each["status"]["silencedBy"]))
        for each in alerts
        if each["status"]["state"] == "suppressed"
    }


def test_alerts_of_devices_are_grouped_and_inhibited_and_silenced_before_they_reach_the_receivers(
    broker: Broker, tmp_path: Path
) -> None:
    one, two, planned = Pi("pi-1"), Pi("pi-2"), Pi("pi-3", site="plant-b")
    gone, alarmed = Pi("pi-4", site="plant-c"), Pi("pi-5", site="plant-c")
    fleet = [one, two, planned, gone, alarmed]
    publish(broker, [message for pi in fleet for message in pi.info()], retain=True)
    publish(broker, [message for pi in (gone, alarmed) for message in pi.deploy(NOW_MS, "p99_ms")], retain=True)
    publish(broker, [(pi.topics.status, b"lost") for pi in (one, two, planned, gone)], retain=True)
    folder = tmp_path / "prometheus"
    folder.mkdir()
    for rules in ("alerts.yml", "slo.yml"):
        (folder / rules).write_text(shipped(rules))
    with receiver() as (hook, heard), exporter_process(broker) as exporter:
        wait_until(lambda: scraped(exporter, "edgert_alarm") == 2, "the exporter knows all devices")
        with alertmanager(tmp_path / "manager", shipped("alertmanager.yml", ("127.0.0.1:9099", f"127.0.0.1:{hook}"))) as manager:  # fmt: skip
            silence = ["silence", "add", "--duration=2h", "--comment=new switches", "site=plant-b"]
            subprocess.run([shutil.which("amtool") or "amtool", f"--alertmanager.url={manager}", *silence], check=True)
            addresses = (("127.0.0.1:9093", manager.removeprefix("http://")), (":9464", f":{exporter}"))
            with prometheus(folder, shipped("prometheus.yml", *addresses)):
                lost = {("plant-a", "pi-1"), ("plant-a", "pi-2")}
                wait_until(
                    lambda: told(heard, "/operators", "firing", "EdgertDeviceOffline") >= lost, "devices are lost", 60
                )
                wait_until(lambda: told(heard, "/operators", "firing", "EdgertModelAlarmed"), "a model is alarmed")
                held = {("EdgertDeviceOffline", "pi-3", True), ("EdgertModelAlarmed", "pi-4", False)}
                wait_until(lambda: suppressed(manager) >= held, "one is silenced, one inhibited")
                publish(broker, [(pi.topics.status, b"online") for pi in (one, two)], retain=True)
                wait_until(
                    lambda: told(heard, "/operators", "resolved", "EdgertDeviceOffline") == lost, "devices are back", 60
                )
    assert told(heard, "/operators", "firing", "EdgertDeviceOffline") == lost | {("plant-c", "pi-4")}
    assert told(heard, "/operators", "firing", "EdgertModelAlarmed") == {("plant-c", "pi-5")}
    groups = [message["groupLabels"] for _, message in notifications(heard) if len(message["alerts"]) == 2]
    assert {"alertname": "EdgertDeviceOffline", "site": "plant-a"} in groups, "one message for both devices"
    assert {to for to, _ in heard} == {"/operators"}


def test_a_missed_target_in_native_histograms_raises_the_fast_burn_alert_and_it_reaches_the_on_call_receiver(
    broker: Broker, tmp_path: Path
) -> None:
    pi, folder = Pi("pi-1"), tmp_path / "prometheus"
    folder.mkdir()
    for rules in ("alerts.yml", "slo.yml"):
        (folder / rules).write_text(shipped(rules))

    def report() -> None:
        """Of 55 requests, 40 are answered within 50 ms, 10 are slower, and 5 fail."""
        publish(broker, pi.window(NOW_MS, [10.0] * 40 + [200.0] * 10, errors=5, uptime_s=60.0))

    publish(broker, pi.info(), retain=True)
    with receiver() as (hook, heard), exporter_process(broker) as exporter:
        report()
        wait_until(lambda: scraped(exporter, "edgert_requests_total") == 55, "the first report is counted")
        with alertmanager(tmp_path / "manager", shipped("alertmanager.yml", ("127.0.0.1:9099", f"127.0.0.1:{hook}"))) as manager:  # fmt: skip
            addresses = (("127.0.0.1:9093", manager.removeprefix("http://")), (":9464", f":{exporter}"))
            with prometheus(folder, shipped("prometheus.yml", *addresses)) as server:
                wait_until(lambda: promql(server, "edgert_requests_total") == 55, "Prometheus has the first report")
                report()
                wait_until(lambda: told(heard, "/on-call", "firing", "EdgertSloBurnsFast"), "the missed target is told")
                missed = 'edgert:slo_missed{model="digits",window="5m"}'
                exact = pytest.approx(15 / 55, rel=0.001)
                wait_until(lambda: promql(server, missed) == exact, "the share is exact")
    (labels,) = (
        message["commonLabels"]
        for to, message in notifications(heard)
        if to == "/on-call" and message["groupLabels"]["alertname"] == "EdgertSloBurnsFast"
        and message["status"] == "firing"
    )  # fmt: skip
    assert (labels["model"], labels["severity"]) == ("digits", "critical")
