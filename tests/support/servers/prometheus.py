"""Real Prometheus and Alertmanager for tests, on free loopback ports, with the servers that they scrape and call."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port


@contextmanager
def exporter_process(broker: Broker, *words: str) -> Iterator[int]:
    """Run `edgert fleet export` and yield its port. The exporter must end with 0 at a SIGTERM."""
    command = [sys.executable, "-m", "edgert_deploy.cli", "fleet", "export", "--broker", broker.settings.address]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"reads port (\d+)", line)
        assert found, line + process.stderr.read()
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(WAIT_S_MAX) == 0, said


@contextmanager
def prometheus(folder: Path, configuration: str, *more: str) -> Iterator[str]:
    """Run a Prometheus with this configuration; rule files are looked up in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "prometheus.yml").write_text(configuration)
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with _server("prometheus", folder, [*words, "--enable-feature=native-histograms", *more]) as url:
        yield url


@contextmanager
def alertmanager(folder: Path, configuration: str) -> Iterator[str]:
    """Run an Alertmanager with this configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "alertmanager.yml").write_text(configuration)
    words = [f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data", "--cluster.listen-address="]
    with _server("prometheus-alertmanager", folder, words) as url:
        yield url


@contextmanager
def receiver(codes: Sequence[int] = ()) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Run a receiver of POST requests; yield its port, and (path, body) of each. Answer `codes`, then 200."""
    heard: list[tuple[str, bytes]] = []
    left = list(codes)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(left.pop(0) if left else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], heard
    finally:
        server.shutdown()
        thread.join(WAIT_S_MAX)
        server.server_close()


def promql(server: str, expression: str, at_s: float = 0.0) -> float | None:
    """Return the first value of an instant query."""
    query = urllib.parse.urlencode({"query": expression, **({"time": at_s} if at_s else {})})
    with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=WAIT_S_MAX) as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


@contextmanager
def _server(program: str, folder: Path, words: list[str]) -> Iterator[str]:
    binary, port = shutil.which(program), free_port()
    if binary is None:
        pytest.skip(f"{program} is not installed: apt-get install {program}")
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([binary, *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _ready(f"http://127.0.0.1:{port}/-/ready"), f"{program} answers; see {folder}/log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_S_MAX)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S_MAX) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
