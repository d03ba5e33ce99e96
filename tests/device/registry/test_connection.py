"""Requests that end, to a registry over TLS and to servers that break the rules."""

from __future__ import annotations

import gc
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from edgert.errors import NotInRegistry, RegistryLoginRefused, RegistryUnreachable
from edgert.registry.address import Repository, digest_of
from edgert.registry.client import Blob, Registry
from edgert.registry.connection import Connection
from edgert.registry.login import Credentials
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.answering import answering, answers
from tests.support.servers.ports import free_port
from tests.support.servers.registries import RegistryServer

CONTENT = os.urandom(300_000)
BLOB = Blob(digest_of(CONTENT), len(CONTENT))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True) as running:
        yield running


def test_a_server_of_an_unknown_authority_is_refused(server: RegistryServer) -> None:
    with pytest.raises(RegistryUnreachable, match="is not trusted"):
        Registry(server.repository).manifest("steady")


def test_a_clock_before_2025_causes_no_warning_of_python(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib3.connection.RECENT_DATE", date(9999, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RegistryLoginRefused):
            Registry(server.repository, None, server.ca).manifest("steady")


def test_a_registry_that_is_down_is_unreachable(server: RegistryServer) -> None:
    nobody = Repository("https", "localhost:1", "plant/models")
    with pytest.raises(RegistryUnreachable, match="connection refused"):
        Registry(nobody, None, server.ca).manifest("steady")


def test_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def proxy(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        answers(200, CONTENT)(handler)

    with answering(proxy) as address:
        monkeypatch.setenv("http_proxy", f"http://{address.host}")
        monkeypatch.setenv("no_proxy", "plant.example")
        Registry(Repository("http", "registry.example", "models")).download(BLOB, tmp_path / "part")
        with pytest.raises(RegistryUnreachable):
            Registry(Repository("http", "plant.example", "models")).manifest("stable")
    assert asked == [f"http://registry.example/v2/models/blobs/{BLOB.digest}"]


@pytest.mark.parametrize(
    ("scheme", "runs", "reason"),
    [("http", False, "connection refused"), ("https", False, "connection refused"), ("https", True, "501")],
)
def test_the_error_names_the_proxy_that_fails(
    monkeypatch: pytest.MonkeyPatch, scheme: str, runs: bool, reason: str
) -> None:
    """In older versions, the error said that the registry refuses connections."""
    with answering(answers(200)) as address:  # this server does not support the method CONNECT
        proxy = address.host if runs else f"127.0.0.1:{free_port()}"
        monkeypatch.setenv(f"{scheme}_proxy", f"http://user:secret@{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        expected = rf"registry\.example through the proxy {proxy}: .*{reason}.*{scheme}_proxy.*no_proxy"
        with pytest.raises(RegistryUnreachable, match=expected) as caught:
            Registry(Repository(scheme, "registry.example", "models")).manifest("stable")
    assert "secret" not in caught.value.message


def test_the_error_about_a_certificate_that_is_not_yet_valid_names_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a board without a battery starts in 1970."""
    monkeypatch.setattr("tests.support.servers.brokers.BEGUN", timedelta(days=-1))
    with (
        RegistryServer.in_folder(tmp_path, secured=True) as server,
        pytest.raises(RegistryUnreachable, match=r"not yet valid\. This machine's clock says 20.*Z: set it"),
    ):
        server.registry().manifest("steady")


@pytest.mark.parametrize(
    "date", ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 01 Jan 2026", ", +", ""]
)
def test_an_impossible_date_of_a_server_is_ignored(date: str) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 404 Not Found\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode())

    with answering(answer) as repository:
        registry = Registry(repository)
        with pytest.raises(NotInRegistry):
            registry.manifest("stable")
    assert registry.date_s is None


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_on_a_kept_connection_that_the_server_closed_is_sent_again(tmp_path: Path, reset: bool) -> None:
    """The server closes while the next request is on its way, so the client cannot know of the close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            answered = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)
            for read_bytes_max in (1 if reset else 65536, 1):  # a close with unread bytes resets the connection
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answered)
                    connection.recv(read_bytes_max)

        thread = threading.Thread(target=serve)
        thread.start()
        registry = Registry(Repository("http", f"127.0.0.1:{listener.getsockname()[1]}", "plant/models"))
        gc.disable()  # the socket closes even without a garbage collection
        try:
            registry.download(BLOB, tmp_path / "first")
            registry.download(BLOB, tmp_path / "second")
            registry.close()
            thread.join(WAIT_S_MAX)
        finally:
            gc.enable()
        assert not thread.is_alive(), "closing the registry ends the connection"
    assert (tmp_path / "second").read_bytes() == CONTENT


def test_an_answer_whose_head_comes_byte_by_byte_is_given_up() -> None:
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        try:
            while not ended.wait(0.01):
                handler.wfile.write(b"X")
                handler.wfile.flush()
        except OSError:
            pass

    with answering(drip) as repository:
        registry = Registry(repository, connection=Connection(answer_s=0.3))
        with pytest.raises(RegistryUnreachable, match="did not answer within"):
            registry.manifest("stable")
        ended.set()


def test_a_login_is_sent_neither_without_tls_nor_to_another_host(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def other(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        answers(200, CONTENT)(handler)

    with answering(other) as elsewhere:
        redirect = answers(307, Location=f"http://{elsewhere.host}/there")
        wants = answers(401, WWW_Authenticate="Basic realm=here")

        def ours(handler: BaseHTTPRequestHandler) -> None:
            (redirect if handler.headers["Authorization"] else wants)(handler)

        with answering(ours) as repository:
            Registry(repository, Credentials("pi", "secret")).download(BLOB, tmp_path / "part")
    assert seen == [None]


def test_a_login_is_not_sent_without_tls_to_a_token_service_of_another_machine() -> None:
    asked: list[str | None] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            answers(200, b'{"token": "t"}')(self)

    with HTTPServer(("127.0.0.2", 0), Other) as elsewhere:  # not one of the names of this machine
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        challenge = f'Bearer realm="http://127.0.0.2:{elsewhere.server_port}/token"'
        with (
            answering(answers(401, WWW_Authenticate=challenge)) as repository,
            pytest.raises(RegistryLoginRefused, match=r"its token service http://127\.0\.0\.2:.* has no TLS"),
        ):
            Registry(repository, Credentials("pi", "secret")).manifest("stable")
        elsewhere.shutdown()
    assert asked == []
