"""`edgert fleet watch` against a real broker: a table, JSON lines, and a broker that refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.telemetry import messages
from edgert.telemetry.mqtt import BrokerRefused, BrokerTlsFailed, BrokerUnreachable
from edgert_deploy.cli.fleet.watch import View, show_once, show_until, sparkline, table_of, watch
from edgert_deploy.common.addresses import host_and_port
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from tests.support.devices import wait_until
from tests.support.fleet import Pi, Sender, Sent, feed, publish
from tests.support.servers.brokers import USER, Broker
from tests.support.servers.ports import free_port


def login(secured: Broker, **changes: str) -> list[str]:
    settings = secured.settings
    options = {"--ca": settings.ca, "--username": USER, "--password-file": settings.password_file, **changes}
    words = [word for option, value in options.items() for word in (option, value) if value]
    return ["--broker", settings.address, "--tls", *words]


def watch_while(sent: Sent, broker: Broker, *options: str) -> Result:
    """Run the command. When the broker's log shows the subscription, publish `sent`."""
    log = broker.folder / "mosquitto.log"
    before = log.read_text().count("New client connected")

    def publish_later() -> None:
        wait_until(lambda: log.read_text().count("New client connected") > before, "watch has connected")
        publish(broker, sent)

    publisher = threading.Thread(target=publish_later)
    publisher.start()
    result = CliRunner().invoke(watch, ["--broker", broker.settings.address, *options])
    publisher.join()
    return result


def watch_until(shows: Sequence[str], broker: Broker, *options: str, sent: Sent | None = None) -> Result:
    """Run the command, longer each time, until the output contains all of `shows`."""
    for for_s in (0.5, 2.0, 10.0, 60.0):
        words = [*options, "--for", f"{for_s}s"]
        if sent is None:
            result = CliRunner().invoke(watch, ["--broker", broker.settings.address, *words])
        else:
            result = watch_while(sent, broker, *words)
        if all(text in result.output for text in shows):
            break
    return result


def failure(*arguments: str) -> EdgeRTError:
    result = CliRunner().invoke(watch, list(arguments))
    assert isinstance(result.exception, EdgeRTError), result.output
    return result.exception


def test_a_snapshot_shows_each_device_and_the_fleet(broker: Broker) -> None:
    slow, fast = Sender("pi-07"), Sender("nuc-1")
    publish(broker, [(slow.topics.status, b"online"), (fast.topics.status, b"lost")], retain=True)
    sent = slow.window([20.0] * 100) + fast.window([2.0] * 300)
    result = watch_until(["online", "lost", "r7", "1/2 online"], broker, "--once", sent=sent)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert "online" in lines["plant-a/pi-07"]
    assert "lost" in lines["plant-a/nuc-1"]
    assert "r7" in lines["plant-a/pi-07"]
    assert "1/2 online" in lines["all"]
    assert "\x1b" not in result.output


def test_json_lines_contain_merged_percentiles(broker: Broker) -> None:
    slow, fast = Sender("pi-07"), Sender("nuc-1")
    sent = slow.window([20.0] * 100) + fast.window([2.0] * 300)
    result = watch_until(['"answered": 400'], broker, "--json", "--interval", "0.1s", sent=sent)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    fleet = [row for row in rows if row["device"] is None][-1]
    assert (fleet["model"], fleet["answered"], fleet["devices"]) == ("digits", 400, 2)
    assert fleet["p50_ms"] == pytest.approx(2.0, rel=0.011)
    assert fleet["p95_ms"] == pytest.approx(20.0, rel=0.011)
    # The command prints a line only after a change, not at each redraw.
    assert len([row for row in rows if row["device"] == "pi-07"]) <= 2


def test_the_command_can_watch_a_single_site(broker: Broker) -> None:
    here, there = Sender("pi-07"), Sender("pi-09", site="plant-b")
    publish(broker, [(here.topics.status, b"online"), (there.topics.status, b"online")], retain=True)
    result = watch_until(["pi-09"], broker, "--site", "plant-b", "--json", "--once")
    assert [json.loads(line)["device"] for line in result.stdout.splitlines()] == ["pi-09"]


def test_text_of_a_device_is_never_read_as_markup_and_never_breaks_the_table(broker: Broker) -> None:
    sender = Sender("pi-07")
    metrics = {**json.loads(sender.window([1.0])[1][1]), "model_version": "[bold]x[/nonsense]"}
    publish(broker, [(sender.topics.metrics("digits"), messages.dump(metrics))], retain=True)
    result = watch_until(["[bold]x[/nonsense]"], broker, "--once")
    assert result.exit_code == 0, result.output
    assert "[bold]x[/nonsense]" in result.output


def test_a_device_without_a_report_is_marked_and_shows_no_version(broker: Broker) -> None:
    sender = Sender("pi-07")
    info = messages.dump({"v": 1, "edgert": "9.8.7"})
    publish(broker, [(sender.topics.status, b"online"), (sender.topics.info, info)], retain=True)
    result = watch_until(["the first report comes within a window"], broker, "--once")
    assert "the first report comes within a window" in result.output
    assert "9.8.7" not in result.output


@pytest.mark.usefixtures("hang_ups_end")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_with_0_and_without_a_message(broker: Broker, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "edgert_deploy.cli", "fleet", "watch", "--broker", broker.settings.address]
    words += ["--interval", "0.2s"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()  # wait for the first table
        process.send_signal(number)
        said = process.stderr.read()
        process.stdout.read()
    assert (process.returncode, said) == (0, "")


def test_an_empty_fleet_gives_a_message(broker: Broker) -> None:
    result = CliRunner().invoke(watch, ["--broker", broker.settings.address, "--once", "--for", "0.3s"])
    assert "no message received yet" in result.output


def test_options_that_match_no_line_give_a_message(broker: Broker) -> None:
    publish(broker, Pi("pi-1").info(), retain=True)
    result = watch_until(["no line fits the options"], broker, "--once", "--device", "pi-9")
    assert "no line fits the options" in result.output


def test_the_command_works_over_tls_with_a_password(secured: Broker) -> None:
    program = "from edgert_deploy.cli.fleet.watch import watch; watch()"
    ended = subprocess.run(
        [sys.executable, "-c", program, *login(secured), "--once", "--for", "0.3s"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "no message received yet" in ended.stdout


def test_a_wrong_password_is_an_error_with_the_next_step(secured: Broker, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    error = failure(*login(secured, **{"--password-file": str(tmp_path / "wrong")}))
    assert isinstance(error, BrokerRefused)
    assert "check the user name and the password file" in error.message


def test_a_login_without_a_user_name_is_an_error_if_the_broker_needs_a_user(secured: Broker) -> None:
    assert "without a user name" in failure(*login(secured, **{"--username": "", "--password-file": ""})).message


def test_an_authority_that_is_not_trusted_is_an_error(secured: Broker) -> None:
    assert isinstance(failure(*login(secured, **{"--ca": ""})), BrokerTlsFailed)


def test_a_missing_broker_is_an_error() -> None:
    error = failure("--broker", f"127.0.0.1:{free_port()}")
    assert isinstance(error, BrokerUnreachable)
    assert error.exit_code == 6


def test_a_missing_password_file_is_named(secured: Broker) -> None:
    error = failure(*login(secured, **{"--password-file": "/nowhere/pw"}))
    assert isinstance(error, ConfigInvalid)
    assert "/nowhere/pw" in error.message


@pytest.mark.parametrize(
    ("broker_option", "address"),
    [
        ("b.local", ("b.local", 1883)),
        ("b.local:99", ("b.local", 99)),
        ("mqtt://b.local:99", ("b.local", 99)),
        ("[::1]:99", ("::1", 99)),
        ("[::1]", ("::1", 1883)),
        ("fe80::1", ("fe80::1", 1883)),
    ],
)
def test_the_address_of_the_broker_is_split_into_host_and_port(broker_option: str, address: tuple[str, int]) -> None:
    assert host_and_port(broker_option, 1883) == address


@pytest.mark.parametrize("bad", ["", ":1883", "b:port"])
def test_an_invalid_address_is_refused(bad: str) -> None:
    with pytest.raises(ConfigInvalid):
        host_and_port(bad, 1883)


@pytest.mark.parametrize("width", [20, 30, 80, 160])
def test_the_table_fits_its_terminal(width: int) -> None:
    state, sender = LivePercentiles(), Sender("pi-07")
    feed(state, [(sender.topics.status, b"online"), *sender.window([2.0] * 10)])
    console = Console(width=width, no_color=True, file=io.StringIO())
    with console.capture() as drawn:
        console.print(table_of(state.rows(0.0), state, width))
    assert "…" not in drawn.get()
    assert "plant-a/pi-07" in drawn.get()
    assert ("state" in drawn.get(), "p99" in drawn.get(), "p99.9" in drawn.get()) == (
        width > 20,
        width > 30,
        width > 80,
    )
    heading, first = drawn.get().splitlines()[:2]
    assert len(re.split(" {2,}", heading.strip())) == len(re.split(" {2,}", first.strip())), "no column is empty"


def test_a_reader_that_ends_is_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, pipe = os.pipe()
    os.close(unread)
    monkeypatch.setattr(sys, "stdout", os.fdopen(pipe, "w"))
    with pytest.raises(BrokenPipeError):  # rich's own console ends the process with exit code 1
        show_once(LivePercentiles(), View(), as_json=False)


def test_a_terminal_that_cannot_redraw_gets_a_table_after_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, intervals = io.StringIO(), iter((1, 2))
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "dumb")
    broker = SimpleNamespace(listen=lambda wait_s: next(intervals))
    with pytest.raises(StopIteration):
        show_until(LivePercentiles(), View(), broker, False, 1.0, None)  # type: ignore[arg-type]
    assert screen.getvalue().count("no message received yet") == 2


def test_lines_can_be_selected_and_sorted_and_show_alarms_and_a_trend() -> None:
    state, slow, fast = LivePercentiles(), Sender("pi-07"), Sender("nuc-1")
    for sender, latency in ((slow, 20.0), (fast, 2.0)):
        for growth in (1, 2):
            feed(state, sender.window([latency * growth] * 10))
    said = messages.envelope(ts_ms=1, boot="b1") | {"digits_alarms": "temp_c,restarting"}
    state.apply(slow.topics.deploy, messages.dump(said), True, 0.0)
    rows = state.rows(0.0)
    assert [row.device for row in View(sort="p99").of(rows)] == ["pi-07", "nuc-1", None]
    assert [row.device for row in View(device="nuc-*").of(rows)] == ["nuc-1", None]
    (alarmed, _) = View(alarms_only=True).of(rows)
    assert (alarmed.device, alarmed.alarms) == ("pi-07", ("restarting", "temp_c"))
    assert sparkline(alarmed.trend_p95_ms) == "▅█"
    state.apply(
        fast.topics.deploy,
        messages.dump(messages.envelope(ts_ms=1, boot="b1") | {"alarms": "channel_stale"}),
        True,
        0.0,
    )
    (own, *_) = View(alarms_only=True).of(state.rows(0.0))
    assert (own.device, own.model, own.alarms) == ("nuc-1", None, ("channel_stale",))
    assert [row.device for row in View(lines=1).of(rows)] == ["nuc-1", None]
