"""`edgert fleet ui` in its own process, and helpers that read its page in a browser."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgert.telemetry import messages
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import Pi, Sent
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Page


def event(pi: Pi, seq: int, ts_ms: int, **fields: Any) -> Sent:
    said = messages.envelope(ts_ms=ts_ms, boot=pi.boot, seq=seq) | fields
    return [(pi.topics.event, messages.dump(said))]


def get(port: int, path: str, headers: dict[str, str] | None = None, verb: str = "GET") -> Any:
    """Return the answer of the page's server; its `body` is the content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)
    connection.request(verb, path, headers={"Host": f"127.0.0.1:{port}", **(headers or {})})
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


@contextmanager
def page_of(broker: Broker, folder: Path, words: list[str]) -> Iterator[str]:
    """Run `edgert fleet ui` in its own process; yield the text that it printed on stdout."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "EDGERT_CONFIG_DIR": str(folder / "config")}
    env.pop("EDGERT_STORE", None)
    argv = [sys.executable, "-m", "edgert_deploy.cli", "fleet", "ui", "--broker", f"127.0.0.1:{broker.port}", *words]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        try:
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=WAIT_S_MAX)[1]
        assert process.returncode == 0, said
        assert "Traceback" not in said


def seen(page: Page, words: str) -> None:
    wait_until(lambda: words in page.evaluate("document.body.innerText"), f"the page says {words!r}")
