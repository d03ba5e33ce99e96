"""What subscribers have in hand when they are killed is not lost: the broker keeps it for their session."""

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
from edgert_deploy.cli.fleet_query import query
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.ledger import ENTRIES_MAX, Ledger
from edgert_deploy.fleet.store import schema
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.subscriber import FleetSubscriber
from tests.host.fleet.export.test_export import scraped
from tests.host.fleet.store.test_store import Pi, Sent
from tests.host.fleet.test_subscriber import publish
from tests.support.brokers import Broker, until

_MAIN = "import sys; from edgert_deploy.cli import main; sys.exit(main())"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker") as running:
        yield running


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that are ended, should the test not come to it."""
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        if program.poll() is None:
            program.kill()
            program.wait(10)


class Recording:
    """`edgert fleet record` in a process of its own."""

    def __init__(self, broker: Broker, store: Path, started: list[subprocess.Popen[str]]) -> None:
        words = ["fleet", "record", "--broker", broker.settings.address, "--store", str(store), "--session", "main"]
        self.process = subprocess.Popen([sys.executable, "-c", _MAIN, *words], stderr=subprocess.PIPE, text=True)
        started.append(self.process)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        assert "recording from" in self.said, self.said + self.process.stderr.read()

    def kill_with_reports_in_hand(self, broker: Broker, sent: Sent) -> None:
        """Killed while it takes `sent`: what is not in the store by then is with it, in sockets and at the broker."""
        self.process.send_signal(signal.SIGSTOP)
        publish(broker, sent)
        self.process.send_signal(signal.SIGCONT)
        time.sleep(random.Random(len(sent)).uniform(0.0, 0.05))
        self.process.kill()
        self.process.wait(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        assert self.process.wait(20) == 0, said
        return said


def test_a_recorder_that_is_killed_again_and_again_misses_nothing_and_writes_nothing_twice(
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
        publish(broker, again := windows(4))  # while nobody listens
        recording = Recording(broker, store, started)
        publish(broker, again[-8:])  # as devices do after a reconnect
    publish(broker, windows(2))
    sent = 2 * sum(len(pi.sketches) for pi in fleet)

    def rows() -> int:
        engine = schema.open_engine(f"sqlite:///{store}", writes=False)
        try:
            with engine.connect() as connection:
                tables = (schema.hist_window, schema.metrics_window)
                return sum(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables)
        finally:
            engine.dispose()

    until(lambda: rows() == sent, "all that was sent is stored", 60.0)
    assert "not understood" in recording.stop()
    assert rows() == sent
    words = ["--store", str(store), "--window", "2h", "--by", "version", "--percentiles", "50,95,99", "--json"]
    asked = CliRunner().invoke(query, words, catch_exceptions=False)
    answers = {group["version"]: group for group in json.loads(asked.stdout)["groups"]}
    for version, answer in answers.items():
        exact = merged(sketch for pi in fleet if pi.version == version for _, sketch in pi.sketches)
        assert answer["answered"] == exact.count
        assert answer["max_ms"] == round(exact.max, 4)
        assert [answer[f"p{p}_ms"] for p in (50, 95, 99)] == [round(exact.quantile(p / 100), 4) for p in (50, 95, 99)]
    assert len(answers) == 2


def test_what_a_bridge_far_behind_may_not_tell_at_once_comes_later(broker: Broker) -> None:
    """An exporter far behind has more to tell its ledger than may be under way: the rest comes later, and nothing is lost."""
    exporter = Exporter(Ledger("b1", "s"), clock=time.monotonic, wall_clock=time.time)
    assert exporter.ledger.topic is not None
    subscriber = FleetSubscriber(broker.settings, exporter, share="s", also=(exporter.ledger.topic,))
    subscriber.open()
    pi, entries = Pi("pi-1"), 3 * ENTRIES_MAX
    for message in (message for n in range(entries // 2) for message in pi.window(n, [1.0])):
        exporter.apply(*message, False, 0.0)
    told = [len(exporter.due(now, 1)) for now in (1.0, 2.0, 3.0)]
    assert told == [1, 1, 1]
    assert exporter.waiting == entries
    exporter.told_nothing()
    while exporter.waiting:
        for topic, payload in exporter.due(time.monotonic(), min(2, subscriber.room)):
            subscriber.publish(topic, payload)
        subscriber.listen(0.1)
    (group,) = exporter.groups.values()
    assert (group.latency.count, exporter.settled) == (entries // 2, entries + 3)
    subscriber.close()


def test_of_two_bridges_one_is_killed_and_started_again_and_every_report_counts_once(
    broker: Broker, started: list[subprocess.Popen[str]]
) -> None:
    dice = random.Random(6)
    fleet = [Pi(f"pi-{n}") for n in range(8)]
    for pi in fleet:
        pi.requests = 500  # they ran before anybody listened

    def reports(windows: int) -> Sent:
        """Of every device; `hist` and `metrics` in turns, so that every exporter is handed both."""
        sent = []
        for _ in range(windows):
            for pi in fleet:
                sent += pi.window(0, [dice.lognormvariate(1, 1) for _ in range(dice.randrange(1, 9))], errors=1)
        return dice.sample(sent[: 2 * len(fleet)], 2 * len(fleet)) + sent[2 * len(fleet) :]

    def exporter(name: str) -> tuple[subprocess.Popen[str], int]:
        words = ["fleet", "export", "--broker", broker.settings.address, "--listen", "127.0.0.1:0", "--share", "s"]
        program = [sys.executable, "-c", _MAIN, *words, "--session", name]
        process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        port = re.search(r"reads port (\d+)", process.stderr.readline())
        assert port
        return process, int(port[1])

    def counted(*ports: int) -> tuple[float, float]:
        names = ("edgert_latency_milliseconds_count", "edgert_requests_total")
        answered, requests = (sum(scraped(port, name) for port in ports) for name in names)
        return answered, requests

    def waiting() -> float:
        return sum(scraped(port, "edgert_exporter_waiting_reports") for port in (one_port, two_port))

    two, two_port = exporter("two")
    one, one_port = exporter("one")
    first = reports(1)
    publish(broker, first)  # from here the counters are known
    known = sum(pi.requests for pi in fleet)
    answered = sum(sketch.count for pi in fleet for _, sketch in pi.sketches)
    until(lambda: counted(one_port, two_port) == (answered, 0), "the first reports are counted", 60.0)
    publish(broker, reports(4))
    answered = sum(sketch.count for pi in fleet for _, sketch in pi.sketches)
    until(lambda: counted(one_port, two_port) == (answered, sum(pi.requests for pi in fleet) - known), "more", 60.0)
    until(lambda: waiting() == 0, "all is settled", 60.0)
    before = counted(one_port)
    one.send_signal(signal.SIGSTOP)
    publish(broker, reports(3))  # its part lies in its socket, and at the broker
    one.kill()
    one.wait(10)
    publish(broker, last := reports(3))
    one, one_port = exporter("one")
    publish(broker, reports(3))
    publish(broker, last[-9:])  # devices send again, after a reconnect
    answered = sum(sketch.count for pi in fleet for _, sketch in pi.sketches)
    wanted = answered - before[0], sum(pi.requests for pi in fleet) - known - before[1]
    until(lambda: counted(one_port, two_port) == wanted, "every report is counted", 60.0)
    time.sleep(1.0)
    assert counted(one_port, two_port) == wanted, "and none twice"
    assert min(counted(one_port)[0], counted(two_port)[0]) > 0
    for process in (one, two):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        process.stderr.close()
