"""The cost of `edgert fleet ui` for a large fleet: process, stream, and page in a real Chromium.

The benchmark runs a real mosquitto, simulated devices with a connection each (`support/fleet_load.py`), the page's
server with its own store, and one open page of 1280 px. `blocked_ms_max` is the longest time that the page's thread was
busy; a user notices about 100 ms and more. `first_paint_s` is the time from opening the page until the map is drawn.

    python -m bench.fleet_ui                                  # 10,000 devices, 2 models: three minutes
    python -m bench.fleet_ui --devices 1000 --models 1 --json
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.support.fleet_load import Load
from bench.support.processes import cpu_us, rss_mb
from bench.support.tables import emit_figures
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Browser

WINDOW_S = 60.0
WATCHED_S = 60.0
WATCH = """() => { window.blocked = []; new PerformanceObserver((list) => window.blocked.push(...list.getEntries().map((e) => e.duration)))
  .observe({type: "longtask", buffered: true}); }"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    needed = options.devices + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    emit_figures(measure(options.devices, options.models), options.json)


def measure(devices: int, models: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-bench-")))
        limits = ("max_queued_messages 200000", "max_inflight_messages 1000", "max_connections -1")
        broker = stack.enter_context(Broker.in_folder(folder / "broker", extra=limits))
        argv = [
            sys.executable,
            "-m",
            "edgert_deploy.cli",
            "fleet",
            "ui",
            "--broker",
            broker.settings.address,
            "--listen",
            "127.0.0.1:0",
        ]
        env = {**os.environ, "XDG_STATE_HOME": str(folder), "EDGERT_CONFIG_DIR": str(folder / "config")}
        process = stack.enter_context(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        empty_mb = rss_mb(process.pid)
        load = Load(broker.port, devices, models)
        stack.callback(load.close)
        load.connect()
        load.run(1, WINDOW_S)  # every device has reported once
        browser = Browser.start()
        stack.callback(browser.close)
        began = time.perf_counter()
        page = browser.open(url, wait_until="domcontentloaded")
        page.evaluate(WATCH)
        page.tab.wait_for_selector(".tile canvas")
        page.tab.wait_for_selector(".drawing svg")
        painted_s = time.perf_counter() - began
        spent_us, at = cpu_us([process.pid]), time.perf_counter()
        sending = threading.Thread(target=load.run, args=(1, WINDOW_S))
        sending.start()
        page.tab.wait_for_timeout(WATCHED_S * 1000)
        cpu_share = (cpu_us([process.pid]) - spent_us) / 1e6 / (time.perf_counter() - at)
        sending.join()
        used_mb = rss_mb(process.pid)
        blocked = page.evaluate("window.blocked")
        store = sum(file.stat().st_size for file in (folder / "edgert").glob("ui-*.db*"))
        assert not page.problems, page.problems
        return {
            "devices": devices,
            "models": models,
            "first_paint_s": round(painted_s, 2),
            "blocked_ms_max": round(max(blocked, default=0.0)),
            "blocked_ms_a_minute": round(sum(blocked)),
            "ui_cpu_share": round(cpu_share, 3),
            "ui_rss_mb": round(used_mb, 1),
            "ui_kb_per_device": round((used_mb - empty_mb) * 1024 / devices, 2),
            "store_bytes_per_report": round(store / (2 * load.reports_sent)),
        }


if __name__ == "__main__":
    main()
