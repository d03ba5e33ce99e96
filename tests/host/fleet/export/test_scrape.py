"""The scrape server survives its clients."""

from __future__ import annotations

import socket
import struct
import urllib.error
import urllib.parse
import urllib.request

import pytest

from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.export.scrape import scrape_server
from tests.support.fleet import NOW_MS, Pi, an_exporter, feed


def test_a_scraper_that_hangs_up_prints_no_message(capfd: pytest.CaptureFixture[str]) -> None:
    exporter = an_exporter(by="device")
    for number in range(300):
        feed(exporter, Pi(f"pi-{number}").window(NOW_MS, [1.0]))
    server = scrape_server(Exposition(exporter), "127.0.0.1", 0)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets the link
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").status == 200
    server.close()
    assert capfd.readouterr().err == ""
