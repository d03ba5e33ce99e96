"""A killed subscriber loses no message: the broker keeps unfinished messages for its session."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from edgert.telemetry.sketch import merged
from edgert_deploy.cli.fleet.query import query
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.batch import MINUTE_MS
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import Pi, Sent, publish, scraped
from tests.support.servers.brokers import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker", extra=("log_type all",)) as running:
        yield running


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list of programs. The fixture ends the programs that still run after the test."""
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        if program.poll() is None:
            program.kill()
            program.wait(WAIT_S_MAX)


class Recording:
    """`edgert fleet record` in a separate process."""

    def __init__(self, broker: Broker, store: Path, started: list[subprocess.Popen[str]]) -> None:
        words = ["fleet", "record", "--broker", broker.settings.address, "--store", str(store), "--session", "main"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgert_deploy.cli", *words], stderr=subprocess.PIPE, text=True
        )
        started.append(self.process)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        assert "recording from" in self.said, self.said + self.process.stderr.read()

    def kill_with_reports_in_hand(self, broker: Broker, sent: Sent) -> None:
        """Kill the recorder while it receives `sent`. Then messages are in the recorder, in sockets, at the broker."""
        self.process.send_signal(signal.SIGSTOP)
        publish(broker, sent)
        self.process.send_signal(signal.SIGCONT)
        time.sleep(random.Random(len(sent)).uniform(0.0, 0.05))
        self.process.kill()
        self.process.wait(WAIT_S_MAX)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        assert self.process.wait(WAIT_S_MAX) == 0, said
        return said


def test_a_recorder_that_is_killed_repeatedly_stores_each_report_exactly_once(
    broker: Broker, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    dice, store = random.Random(4), tmp_path / "fleet.db"
    fleet = [Pi(f"pi-{n}", version=f"r{1 + n % 2}") for n in range(5)]
    now_ms = time.time_ns() // 1_000_000 // MINUTE_MS * MINUTE_MS
    minutes = iter(range(40, 1, -1))

    def windows(number: int) -> Sent:
        return [
            message
            for minute in (next(minutes) for _ in range(number))
            for pi in fleet
            for message in pi.window(now_ms - minute * MINUTE_MS, [dice.lognormvariate(1, 1) for _ in range(20)])
        ]

    recording = Recording(broker, store, started)
    for _ in range(3):
        recording.kill_with_reports_in_hand(broker, windows(6))
        publish(broker, again := windows(4))  # while no recorder runs
        recording = Recording(broker, store, started)
        publish(broker, again[-8:])  # devices do so after a reconnect
    publish(broker, windows(2))
    sent = 2 * sum(len(pi.sketches) for pi in fleet)

    def rows() -> int:
        engine = database.open_engine(f"sqlite:///{store}", writes=False)
        try:
            with engine.connect() as connection:
                tables = (schema.hist_window, schema.metrics_window)
                return sum(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables)
        finally:
            engine.dispose()

    wait_until(lambda: rows() == sent, "all that was sent is stored")
    assert "not understood" in recording.stop()
    assert rows() == sent
    words = ["--store", str(store), "--period", "2h", "--by", "version", "--percentiles", "50,95,99", "--json"]
    asked = CliRunner().invoke(query, words, catch_exceptions=False)
    answers = {group["version"]: group for group in json.loads(asked.stdout)["groups"]}
    for version, answer in answers.items():
        exact = merged(sketch for pi in fleet if pi.version == version for _, sketch in pi.sketches)
        assert answer["answered"] == exact.count
        assert answer["max_ms"] == round(exact.max, 4)
        assert [answer[f"p{p}_ms"] for p in (50, 95, 99)] == [round(exact.quantile(p / 100), 4) for p in (50, 95, 99)]
    assert len(answers) == 2


def test_an_exporter_that_is_killed_and_started_again_counts_each_report_exactly_once(
    broker: Broker, started: list[subprocess.Popen[str]]
) -> None:
    dice = random.Random(6)
    fleet = [Pi(f"pi-{n}") for n in range(8)]

    def reports(windows: int) -> Sent:
        return [
            message
            for _ in range(windows)
            for pi in fleet
            for message in pi.window(0, [dice.lognormvariate(1, 1) for _ in range(dice.randrange(1, 9))], errors=1)
        ]

    def exporter() -> tuple[subprocess.Popen[str], int]:
        words = ["fleet", "export", "--broker", broker.settings.address, "--listen", "127.0.0.1:0", "--session", "main"]
        process = subprocess.Popen(
            [sys.executable, "-m", "edgert_deploy.cli", *words], stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stderr is not None
        port = re.search(r"reads port (\d+)", process.stderr.readline())
        assert port
        return process, int(port[1])

    def answered() -> int:
        return sum(sketch.count for pi in fleet for _, sketch in pi.sketches)

    process, port = exporter()
    publish(broker, reports(4))
    wait_until(lambda: scraped(port, "edgert_latency_milliseconds_count") == answered(), "the first are counted")
    wait_until(lambda: _unacknowledged(broker) == 0, "the acknowledgements reach the broker")
    before = answered()
    process.send_signal(signal.SIGSTOP)
    publish(broker, reports(3))  # these reports are in the recorder's socket and at the broker
    process.kill()
    process.wait(WAIT_S_MAX)
    publish(broker, repeated := reports(3))
    process, port = exporter()
    publish(broker, reports(3))
    publish(broker, repeated[-9:])  # devices send again after a reconnect
    wanted = answered() - before
    wait_until(lambda: scraped(port, "edgert_latency_milliseconds_count") >= wanted, "every report is counted")
    publish(broker, reports(1))
    wait_until(lambda: scraped(port, "edgert_latency_milliseconds_count") == answered() - before, "and none twice")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S_MAX) == 0
    assert process.stderr is not None
    process.stderr.close()


def _unacknowledged(broker: Broker) -> int:
    """Return the number of messages that the broker has sent and that are not acknowledged."""
    log = (broker.folder / "mosquitto.log").read_text()
    return len(re.findall(r"Sending PUBLISH to .*, q1,", log)) - log.count("Received PUBACK from")
