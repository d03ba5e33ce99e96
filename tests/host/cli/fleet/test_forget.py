"""After `edgert fleet forget`, broker, store and viewers no longer have the device."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgert.errors import ConfigInvalid, DeviceError
from edgert.telemetry import forwarder_process
from edgert.telemetry.home_assistant import discovery
from edgert_deploy.bootstrap.uninstall import uninstall
from edgert_deploy.cli.fleet.forget import forget
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports.local import LocalTransport
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.recorder import REMOVED
from edgert_deploy.fleet.store.rollouts import StoredRollouts
from tests.support.fleet import NOW_MS, Pi, Sent, ask, feed, publish, record, retained
from tests.support.servers.brokers import Broker


def a_device(name: str, status: bytes = b"lost", site: str = "plant-a") -> tuple[Pi, Sent]:
    """A device with messages that the broker retains."""
    pi = Pi(name, site=site)
    discovered = discovery(pi.topics, "homeassistant", ["digits"], {}, 60.0)
    return pi, [*pi.info()[:1], (pi.topics.status, status), *pi.deploy(NOW_MS, "temp_c"), discovered]


def cli(broker: Broker, *words: str) -> Result:
    return CliRunner().invoke(forget, ["--broker", f"127.0.0.1:{broker.port}", *words])


def test_a_device_is_forgotten_by_the_broker_and_by_the_store_and_by_home_assistant(
    tmp_path: Path, store_url: str
) -> None:
    gone, said = a_device("pi-1")
    stays, other = a_device("pi-2", b"online")
    event = json.dumps({"v": 1, "ts": NOW_MS, "boot": "b1", "seq": 1, "event": "degraded", "model": "digits"}).encode()
    reports = gone.window(NOW_MS - 1, [1.0] * 3) + stays.window(NOW_MS - 1, [2.0] * 5)
    gone.seq += 3
    reports += gone.window(NOW_MS - 1, [1.0]) + [(gone.topics.event, event)]
    record(store_url, said + other + reports)
    with Broker.in_folder(tmp_path / "broker") as broker:
        publish(broker, said + other, retain=True)
        done = cli(broker, "pi-1", "--store", store_url, "--json")
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        assert (answer["site"], len(answer["topics"])) == ("plant-a", 4)
        assert retained(broker) == {topic for topic, _ in other}
        assert "0 retained messages cleared" in cli(broker, "pi-1", "--site", "plant-a", "--store", store_url).stdout
        assert isinstance(cli(broker, "pi-9", "--store", store_url).exception, ConfigInvalid)
    query = FleetQuery(store_url)
    assert [row["device"] for row in query.devices()] == ["pi-2"]
    assert query.events(0, NOW_MS + 1) == []
    query.close()
    (answer_,) = ask(store_url, 1, ("device",))
    assert (answer_.group["device"], answer_.latency.count, answer_.missing) == ("pi-2", 5, {})
    assert record(store_url, gone.window(NOW_MS - 1, [1.0])).recorded == 2, "it may come back, as a new one"


def test_a_device_that_was_uninstalled_is_found_in_the_store(tmp_path: Path, store_url: str) -> None:
    record(store_url, a_device("pi-1")[0].window(NOW_MS - 1, [1.0]))
    with Broker.in_folder(tmp_path / "broker") as broker:
        done = cli(broker, "pi-1", "--store", store_url, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["site"] == "plant-a"
        assert isinstance(cli(broker, "pi-1", "--store", store_url).exception, ConfigInvalid), "nothing is left of it"


def test_a_store_that_has_only_rollouts_has_no_rows_to_remove(tmp_path: Path) -> None:
    url = f"{tmp_path}/fleet.db"
    StoredRollouts(url).close()
    with Broker.in_folder(tmp_path / "broker") as broker:
        publish(broker, a_device("pi-1")[1], retain=True)
        done = cli(broker, "pi-1", "--store", url)
        assert done.stdout == "pi-1: 4 retained messages cleared\n", done.output
        assert "has no reports yet" in done.stderr


def test_a_device_that_is_online_or_exists_at_two_sites_is_not_forgotten_by_mistake(tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker") as broker:
        publish(broker, a_device("pi-1", b"online")[1], retain=True)
        assert isinstance(cli(broker, "pi-1").exception, DeviceError)
        publish(broker, a_device("pi-1", site="plant-b")[1], retain=True)
        assert "plant-a, plant-b" in str(cli(broker, "pi-1").exception)
        held, wrong = retained(broker), tmp_path / "wrong.db"
        said = cli(broker, "pi-1", "--site", "plant-a", "--force", "--store", str(wrong)).exception
        assert "there is no store" in str(said)
        assert (retained(broker), wrong.exists()) == (held, False)
        assert cli(broker, "pi-1", "--site", "plant-a", "--force").exit_code == 0
        assert {topic.split("/")[2] for topic in retained(broker) if topic.startswith("edgert/")} == {"plant-b"}


def test_running_viewers_drop_a_forgotten_device_and_the_store_remembers_this(tmp_path: Path) -> None:
    _, said = a_device("pi-1")
    state, exporter = LivePercentiles(), Exporter("b1", wall_clock=lambda: 0.0)
    for listener in (state, exporter):
        feed(listener, said[:3], retained=True)
        assert len(listener.devices) == 1
        for topic, _ in said[:3]:
            listener.apply(topic, b"", False, 0.0)
        assert (listener.devices, listener.refused) == ({}, 0)
    url = f"{tmp_path}/fleet.db"
    record(url, said[:3] + [(topic, b"") for topic, _ in said[:3]])
    query = FleetQuery(url)
    assert [row["status"] for row in query.devices()] == [REMOVED]
    query.close()


def test_an_uninstall_clears_the_retained_messages_of_the_device_or_says_how_to_clear_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state, home = tmp_path / "state", tmp_path / "home"
    (home / "venv" / "bin").mkdir(parents=True)
    state.mkdir()
    python = home / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    device = Device("pi-1", "ssh", "pi@pi-1", "p", str(state), home=str(home), host_key="k")
    with Broker.in_folder(tmp_path / "broker") as broker:
        config = f'device = "pi-1"\nsite = "plant-a"\nprofile = "p"\n[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'
        (state / "config.toml").write_text(config + 'home_assistant = "homeassistant"\n')
        publish(broker, a_device("pi-1", b"offline")[1], retain=True)
        shown = uninstall(device, LocalTransport(device), purge=True, dry_run=True)
        assert any(f"the broker 127.0.0.1:{broker.port} retains of plant-a/pi-1" in what for what in shown.removed)
        assert len(retained(broker)) == 4
        assert forwarder_process.main(["--state", str(state), "--clear", "remove"]) == 0
        assert capsys.readouterr().out.startswith("removed the messages that the broker")
        assert retained(broker) == set()
    assert forwarder_process.main(["--state", str(state), "--clear", "remove"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("left the messages")
    assert "`edgert fleet forget pi-1` clears them" in said
    assert uninstall(replace(device, home=str(tmp_path / "nothing")), LocalTransport(device), purge=True, dry_run=True)
