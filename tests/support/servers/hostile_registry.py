"""A registry for tests that answers as a test wants, for example like a hostile or broken registry.

Tests of the behaviour of a good registry use a real registry (tests/support/servers/registries.py).
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.channel import Entry, Statement, sign_statement
from edgert.bundle.runtime_release import RuntimeRelease, sign_runtime
from edgert.bundle.signing import SigningKey
from edgert.names import RUNTIME
from edgert.registry.address import digest_of
from edgert.registry.artifacts import channel_manifest, channel_tag, release_manifest, runtime_manifest

# Answers a request in place of the registry and returns True, or returns False.
Fault = Callable[[BaseHTTPRequestHandler], bool]
STATEMENT = Statement("stable", 1, "2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z", ())


@dataclass
class HostileRegistry:
    """`manifests` by tag or digest, `blobs` by digest, as bytes; `fault` may answer first.

    `asked` has the paths of all requests.
    """

    port: int = 0
    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    fault: Fault = lambda request: False
    asked: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return f"oci+http://127.0.0.1:{self.port}/plant/models"

    def put_blob(self, data: bytes) -> str:
        digest = digest_of(data)
        self.blobs[digest] = data
        return digest

    def put_release(self, bundle: Path) -> Entry:
        """Put all files of a bundle; return the entry of a channel for it."""
        with open_bundle(bundle, None) as opened, tempfile.TemporaryDirectory() as folder:
            manifest = opened.manifest
            opened.unpack(Path(folder), frozenset(entry.path for entry in manifest.files))
            for entry in manifest.files:
                self.put_blob((Path(folder) / entry.path).read_bytes())
            oci = release_manifest(manifest, opened.envelope, opened.digest)
            self.manifests[digest_of(oci)] = oci
            envelope = self.put_blob(opened.envelope.raw).removeprefix("sha256:")
            return Entry(
                manifest.model, manifest.release, opened.digest, envelope, hashlib.sha256(oci).hexdigest(), watch_s=0.5
            )

    def put_runtime(self, release: RuntimeRelease, wheel: bytes, key: SigningKey) -> Entry:
        """Put a release of the runtime with one wheel; return the entry of a channel for it."""
        self.put_blob(wheel)
        envelope = sign_runtime(release, key)
        self.put_blob(envelope)
        digest, of_envelope, oci = (
            hashlib.sha256(each).hexdigest()
            for each in (release.to_bytes(), envelope, runtime_manifest(release, envelope))
        )
        return Entry(RUNTIME, release.release, digest, of_envelope, oci)

    def put_channel(self, key: SigningKey, counter: int, *entries: Entry, **changes: object) -> Statement:
        """Sign a statement and make it the newest one of its channel."""
        statement = replace(STATEMENT, counter=counter, entries=entries, **changes)  # type: ignore[arg-type]
        self.put_envelope(sign_statement(statement, key), statement.channel)
        return statement

    def put_envelope(self, envelope: bytes, channel: str = "stable") -> None:
        self.put_blob(envelope)
        self.manifests[channel_tag(channel)] = channel_manifest(envelope, channel, 1, "2099-01-01T00:00:00Z")

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if self.fault(request):
            return
        kind, name = re.fullmatch(r"/v2/plant/models/(manifests|blobs)/(.+)", request.path).groups()  # type: ignore[union-attr]
        data = (self.manifests if kind == "manifests" else self.blobs).get(name)
        if data is None:
            send(request, 404)
            return
        if request.headers.get("If-None-Match") == f'"{digest_of(data)}"':
            send(request, 304)
            return
        headers, status = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")):
            headers["Content-Range"] = f"bytes {found[1]}-{found[2]}/{len(data)}"
            data, status = data[int(found[1]) : int(found[2]) + 1], 206
        send(request, status, data, headers)
        self.sent_bytes += len(data)


def send(
    request: BaseHTTPRequestHandler, status: int, data: bytes = b"", headers: dict[str, str] | None = None
) -> None:
    """Send an answer with its length."""
    request.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(data)


@contextmanager
def hostile_registry() -> Iterator[HostileRegistry]:
    """Yield a registry that listens on a free port of loopback."""
    registry = HostileRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms until the client acknowledges its headers

        def do_GET(self) -> None:
            try:
                registry.answer(self)
            except OSError:  # the client is gone
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield registry
    finally:
        registry.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
