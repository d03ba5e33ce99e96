"""A bundle becomes a release in a real registry, and tools of other projects can read the release."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import (
    BundleCorrupt,
    ConfigInvalid,
    NotInRegistry,
    RegistryCorrupt,
    RegistryLoginRefused,
    RegistryUnreachable,
)
from edgert.registry.address import Repository, parse_repository
from edgert.registry.artifacts import RELEASE_TYPE, blob_of, file_blob
from edgert.registry.client import Registry
from edgert_deploy.rollout import publish as publishing
from edgert_deploy.rollout.publish import Release, publish
from hil.support.relay import Relay
from tests.support.bundles import make_null_bundle
from tests.support.servers.registries import RegistryServer, program


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True) as running:
        yield running


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


def test_the_registry_has_every_file_of_a_published_release(
    server: RegistryServer, key: SigningKey, tmp_path: Path
) -> None:
    path = make_null_bundle(tmp_path, key, "whole", padding_bytes=200_000)
    counts: list[tuple[int, int]] = []
    release = publish(server.registry(), path, lambda sent, total: counts.append((sent, total)))
    assert release.tag == "whole-1"
    assert counts[-1] == (release.sent_bytes, release.sent_bytes)
    registry = server.registry()
    with open_bundle(path, None) as bundle:
        assert registry.has(blob_of(bundle.envelope.raw))
        assert all(registry.has(file_blob(entry)) for entry in bundle.manifest.files)


def test_equal_files_are_sent_once(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    weights = bytes(range(256)) * 1000
    first = publish(server.registry(), make_null_bundle(tmp_path, key, "shared", padding=weights))
    second = publish(server.registry(), make_null_bundle(tmp_path, key, "shared", 2, padding=weights))
    assert first.sent_bytes >= len(weights)
    assert second.sent_bytes < 10_000
    assert publish(server.registry(), tmp_path / "shared-1.edgert").sent_bytes == 0


def test_the_upload_of_a_file_continues_after_the_link_breaks(
    key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "PAUSES_S", (0.01, 0.01, 0.01))
    path, counts = make_null_bundle(tmp_path, key, "cut", padding_bytes=500_000), list[tuple[int, int]]()
    with RegistryServer.in_folder(tmp_path / "registry") as plain, ExitStack() as stack:

        def through(cuts: list[int]) -> Registry:
            relay = stack.enter_context(Relay(plain.port, cut_after=cuts))
            return Registry(parse_repository(plain.address.replace(str(plain.port), str(relay.port))))

        with pytest.raises(RegistryUnreachable):
            publish(through([300_000] + [100_000] * 20), path)
        with pytest.raises(NotInRegistry):
            plain.registry().manifest("cut-1")
        release = publish(through([300_000, 100_000]), path, lambda sent, total: counts.append((sent, total)))
        with open_bundle(path, None) as bundle:
            assert all(plain.registry().has(file_blob(entry)) for entry in bundle.manifest.files)
    assert counts[-1] == (release.sent_bytes, release.sent_bytes), "bytes that were sent in vain are not counted"
    assert max(sent for sent, _ in counts) == release.sent_bytes


def test_each_wait_for_a_busy_registry_is_reported(
    key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "PAUSE_S_MAX", 0.01)
    monkeypatch.setattr(publishing, "PAUSES_S", (0.01, 0.01, 0.01))
    said: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if "/manifests/" in self.path else 503)
            self.send_header("Retry-After", "30")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy, ThreadPoolExecutor() as threads:
        threads.submit(busy.serve_forever, 0.02)
        try:
            registry = Registry(Repository("http", f"127.0.0.1:{busy.server_port}", "plant/models"))
            with pytest.raises(RegistryUnreachable):
                publish(registry, make_null_bundle(tmp_path, key, "busy"), on_pause=said.append)
        finally:
            busy.shutdown()
    assert len(said) == 3
    assert all(line.startswith("trying again in 0 s: ") and "answers 503" in line for line in said)


def test_a_release_is_immutable(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    publish(server.registry(), make_null_bundle(tmp_path / "a", key, "fixed"))
    with pytest.raises(ConfigInvalid, match="release 1 of fixed already"):
        publish(server.registry(), make_null_bundle(tmp_path / "b", key, "fixed", op="sum"))


@pytest.mark.parametrize("length", [None, 0, 1000])
def test_a_file_that_the_registry_lost_is_sent_again_although_its_index_names_it(
    key: SigningKey, tmp_path: Path, length: int | None
) -> None:
    path = make_null_bundle(tmp_path, key, "lost", padding_bytes=50_000)
    with RegistryServer.in_folder(tmp_path / "registry") as server:
        largest = max(publish(server.registry(), path).files, key=lambda blob: blob.size_bytes)
        (stored,) = server.folder.rglob(f"sha256/*/{largest.digest.removeprefix('sha256:')}/data")
        if length is None:
            stored.unlink()
        else:  # this registry keeps a truncated file even if the file is sent again
            os.truncate(stored, length)
            with pytest.raises(RegistryCorrupt, match=r"its storage is damaged\. Remove that blob"):
                publish(server.registry(), path)
            stored.unlink()
        assert publish(server.registry(), path).sent_bytes == largest.size_bytes
        assert stored.stat().st_size == largest.size_bytes


def test_a_damaged_bundle_leaves_no_release(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    path = make_null_bundle(tmp_path, key, "damaged", padding_bytes=50_000)
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleCorrupt):
        publish(server.registry(), path)
    with pytest.raises(NotInRegistry):
        server.registry().manifest("damaged-1")


def test_the_error_names_a_refused_login(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    server.write_login("wrong")
    try:
        with pytest.raises(RegistryLoginRefused, match="publisher"):
            publish(server.registry(), make_null_bundle(tmp_path, key, "refused"))
    finally:
        server.write_login("right horse")


# --- other people's tools -------------------------------------------------------------------


def skopeo(server: RegistryServer, *words: str) -> str:
    done = subprocess.run([program("skopeo"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def published(server: RegistryServer, key: SigningKey, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("bundle")
    return publish(server.registry(), make_null_bundle(folder, key, "tools", padding_bytes=100_000))


def reach(server: RegistryServer, side: str = "") -> list[str]:
    certificates = server.folder / "certificates"
    certificates.mkdir(exist_ok=True)
    (certificates / "ca.crt").write_bytes(server.ca.read_bytes())
    return ["--authfile", str(server.login_file), f"--{side}cert-dir", str(certificates)]


def test_skopeo_inspects_a_release(server: RegistryServer, published: Release) -> None:
    where = f"docker://{server.address.removeprefix('oci://')}:tools-1"
    raw = json.loads(skopeo(server, "inspect", "--raw", *reach(server), where))
    assert raw["artifactType"] == RELEASE_TYPE
    assert raw["annotations"]["edgert.model"] == "tools"
    assert raw["annotations"]["edgert.digest"] == published.digest
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in raw["layers"]]
    assert titles[0] == "manifest.dsse.json"
    assert "null/model.json" in titles


def test_skopeo_copies_a_release_to_a_folder_and_to_another_repository(
    server: RegistryServer, published: Release, tmp_path: Path
) -> None:
    where = f"docker://{server.address.removeprefix('oci://')}:tools-1"
    skopeo(server, "copy", *reach(server, "src-"), where, f"dir:{tmp_path}/out")
    copies = {f"sha256:{path.name}" for path in (tmp_path / "out").iterdir()}
    assert {blob.digest for blob in published.files} <= copies
    copied = f"docker://localhost:{server.port}/mirror/models:tools-1"
    skopeo(server, "copy", *reach(server, "src-"), *reach(server, "dest-")[2:], where, copied)
    raw = skopeo(server, "inspect", "--raw", *reach(server), copied)
    assert f"sha256:{published.oci_manifest}" == blob_of(raw.encode()).digest  # byte for byte
