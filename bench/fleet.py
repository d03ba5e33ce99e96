"""The number of devices that one real mosquitto and one real `edgert fleet export` can handle.

The devices are simulated. Every device has its own connection and reports once a minute, as in the field
(`support/fleet_load.py`). A sent report is `lost` if no exporter has counted it, and if then no exporter counts any
report for GIVE_UP_S. `drained_s` is the time from the last sent report to the last counted report. Reports are late if
this time is more than LATE_S. `--find-max` sends faster and faster until reports are lost or late. It uses one exporter
first, then two and four exporters, each for one site. A device with a window of 30 s counts as two devices. The load,
the broker and the exporters share this machine's processors. The output has the share of each, and the needs of 100,000
devices, which are calculated from these shares.

    python -m bench.fleet                                    # 10,000 devices, 2 models: three minutes
    python -m bench.fleet --devices 1000 --models 1 --json
    python -m bench.fleet --recorder                         # with a recorder beside the exporter, into SQLite
    python -m bench.fleet --find-max                         # a quarter of an hour
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.fleet_load import Load
from bench.support.processes import cpu_us, rss_mb
from bench.support.tables import emit_figures
from tests.support.servers.brokers import Broker

WINDOW_S = 60.0
LATE_S = 5.0
GIVE_UP_S = 30.0  # this time is long, because on a busy machine an exporter may pause without a loss
MAX_WINDOWS = 2
SENDING_S_MIN = 30.0  # with a shorter burst, all reports could be late
TRIES = 2  # a second attempt is made, because another program may have used the processor during the first
POLL_S = 1.0  # scrapes are rare, because a scrape costs the exporter more than many reports
FASTER = 1.6
STEPS_MAX = 12
SHARES = (1, 2, 4)
CALCULATED = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2, help="number of windows that each device reports")
    parser.add_argument("--exporters", type=int, default=1, help="number of exporters; each has one site")
    parser.add_argument("--by", default="site,model,version,profile", help="dimensions of the exporter's series")
    parser.add_argument("--recorder", action="store_true", help="run a recorder into SQLite beside the exporter")
    parser.add_argument("--find-max", action="store_true", help="send ever faster, with 1, 2 and 4 exporters")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    options = parser.parse_args()
    _allow_descriptors(options.devices)
    if options.find_max:
        for exporters in SHARES:
            emit_figures(find_max(options.devices, options.models, exporters, options.by), options.json)
        return
    with a_fleet(options.devices, options.models, options.exporters, options.by, options.recorder) as fleet:
        emit_figures(fleet.measure(options.windows, WINDOW_S), options.json)


def find_max(devices: int, models: int, exporters: int, by: str) -> dict[str, Any]:
    """Return the highest rate without loss or delay, as the number of devices with a window of a minute."""
    held: dict[str, Any] = {}
    with a_fleet(devices, models, exporters, by, recorder=False) as fleet:
        window_s = WINDOW_S / 3
        for _ in range(STEPS_MAX):
            limit = ""
            for _ in range(TRIES):
                said = fleet.measure(max(MAX_WINDOWS, math.ceil(SENDING_S_MIN / window_s)), window_s)
                equal = round(devices * WINDOW_S / said["window_s"])
                print(f"{exporters} exporters, as {equal:,} devices: lost {said['lost']}, drained in {said['drained_s']} s", file=sys.stderr)  # fmt: skip
                kept_up = said["window_s"] < window_s * 1.05
                late = said["lost"] or said["drained_s"] > LATE_S
                limit = "broker and exporter" if late else "" if kept_up else "the load generator"
                if not limit:
                    held = {"equal_to_devices": equal, **said}
                    break
            if limit:
                return {**held, "limit": limit}
            window_s /= FASTER
    return held


@dataclass
class Program:
    """A measured process."""

    pid: int
    port: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the exporter's own series with their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        wanted = ("edgert_exporter", "edgert_requests_total", "edgert_latency_milliseconds_count")
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith(wanted))}  # fmt: skip


@dataclass
class Fleet:
    """The running broker, exporters and devices, and with --recorder, the recorder."""

    load: Load
    broker: Program
    exporters: list[Program]
    recorder: Program | None
    store: Path
    empty_mb: list[float]

    def measure(self, windows: int, window_s: float) -> dict[str, Any]:
        before, cpu_before = self._counted(), self._cpu_s()
        took_s = self.load.run(windows, window_s)
        sent, drained_s = self.load.reports_sent, self._drained(before + self.load.reports_sent)
        cpu_s = [after - then for after, then in zip(self._cpu_s(), cpu_before, strict=True)]
        devices, used_mb = self.load.devices, [rss_mb(exporter.pid) for exporter in self.exporters]
        messages_per_s = (sent + windows * devices) / took_s  # a `sys` message is not a report
        per_device_kb = sum(now - then for now, then in zip(used_mb, self.empty_mb, strict=True)) * 1024 / devices
        exporter_s, broker_s = sum(cpu_s[1 : 1 + len(self.exporters)]), cpu_s[0]
        grown = CALCULATED / devices * window_s / WINDOW_S
        said: dict[str, Any] = {
            "devices": devices,
            "models": self.load.models,
            "exporters": len(self.exporters),
            "window_s": round(took_s / windows, 2),
            "messages_per_s": round(messages_per_s, 1),
            "lost": round(before + sent - self._counted()),
            "drained_s": round(drained_s, 1),
            **{f"{kind}_payload_bytes": size for kind, size in self.load.payload_bytes.items()},
            "exporter_rss_mb": round(max(used_mb), 1),
            "exporter_kb_per_device": round(per_device_kb, 2),
            "exporter_cpu_share": round(exporter_s / took_s, 3),
            "broker_cpu_share": round(broker_s / took_s, 3),
            "exporter_us_per_message": round(exporter_s / (messages_per_s * took_s) * 1e6, 1),
            "broker_us_per_message": round(broker_s / (messages_per_s * took_s) * 1e6, 1),
            f"calculated_exporter_cpu_share_{CALCULATED}": round(exporter_s / took_s * grown, 2),
            f"calculated_broker_cpu_share_{CALCULATED}": round(broker_s / took_s * grown, 2),
            f"calculated_exporter_rss_mb_{CALCULATED}": round(sum(self.empty_mb) + per_device_kb * CALCULATED / 1024),
        }
        if self.recorder:
            said |= {
                "recorder_rss_mb": round(rss_mb(self.recorder.pid), 1),
                "recorder_cpu_share": round(cpu_s[-1] / took_s, 3),
                "store_bytes_per_report": round(self._store_bytes() / (self._counted() or 1)),
            }
        return said

    def _counted(self) -> float:
        """Return the number of reports that the exporters counted."""
        total = 0.0
        for exporter in self.exporters:
            said = exporter.metrics()
            handed = sum(
                said.get(f'edgert_exporter_messages_total{{kind="{kind}"}}', 0) for kind in ("hist", "metrics")
            )
            total += handed - said["edgert_exporter_duplicates_total"]
        return total

    def _drained(self, expected: float) -> float:
        """Wait until all reports are counted, or no more reports arrive. Return the seconds that this took."""
        began = last_change = time.perf_counter()
        counted = -1.0
        while time.perf_counter() - last_change < GIVE_UP_S and counted < expected:
            if (now := self._counted()) != counted:
                counted, last_change = now, time.perf_counter()
            time.sleep(POLL_S)
        return last_change - began

    def _cpu_s(self) -> list[float]:
        programs = [self.broker, *self.exporters, *([self.recorder] if self.recorder else [])]
        return [cpu_us([program.pid]) / 1e6 for program in programs]

    def _store_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.store.parent.glob(f"{self.store.name}*"))


@contextmanager
def a_fleet(devices: int, models: int, exporters: int, by: str, recorder: bool) -> Iterator[Fleet]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-bench-")))
        limits = ("max_queued_messages 200000", "max_inflight_messages 1000", "max_connections -1")
        broker = stack.enter_context(Broker.in_folder(folder / "broker", extra=limits))
        address = broker.settings.address
        sites = [["--site", f"site-{n}"] for n in range(exporters)] if exporters > 1 else [[]]
        started = [
            stack.enter_context(_program("export", "--broker", address, "--listen", "127.0.0.1:0", "--by", by, *site))
            for site in sites
        ]
        store = folder / "fleet.db"
        writer = stack.enter_context(_program("record", "--broker", address, "--store", str(store))) if recorder else None  # fmt: skip
        empty_mb = [rss_mb(exporter.pid) for exporter in started]
        load = Load(broker.port, devices, models, sites=exporters if exporters > 1 else 10)
        stack.callback(load.close)
        load.connect()
        print(f"{devices:,} devices are connected", file=sys.stderr)
        assert broker._process is not None
        yield Fleet(load, Program(broker._process.pid), started, writer, store, empty_mb)


@contextmanager
def _program(*words: str) -> Iterator[Program]:
    """Start one `edgert fleet` command, which is ended by its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "edgert_deploy.cli", "fleet", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        port = re.search(r"reads port (\d+)", line)
        assert process.poll() is None, line
        yield Program(process.pid, int(port[1]) if port else 0)
    finally:
        process.send_signal(signal.SIGTERM)
        if said := process.stderr.read():
            print(said, end="", file=sys.stderr)
        process.wait(60)


def _allow_descriptors(devices: int) -> None:
    needed, (_, hard) = devices + 200, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        sys.exit(f"{devices} devices need {needed} descriptors, and {hard} are allowed: ulimit -n, or fewer --devices")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(needed, 1024)) if hard > 0 else needed, hard))


if __name__ == "__main__":
    main()
