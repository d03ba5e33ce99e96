"""A channel is read from a real registry; a manifest of another form under its tag is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgert.bundle.channel import STATEMENT_BYTES_MAX
from edgert.errors import NotInRegistry, RegistryCorrupt
from edgert.registry.artifacts import EMPTY, blob_of, channel_manifest, channel_tag, read_channel, statement_blob
from tests.support.servers.registries import RegistryServer

STATEMENT = b'{"signed": "statement"}'
MANIFEST = channel_manifest(STATEMENT, "stable", 7, "2027-02-19T08:00:00Z")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry")) as running:
        for content in (EMPTY, STATEMENT, bytes(STATEMENT_BYTES_MAX + 1)):
            running.registry().upload(blob_of(content), content)
        yield running


def test_a_channel_is_read_only_when_it_changed(server: RegistryServer) -> None:
    registry = server.registry()
    digest = registry.put_manifest(channel_tag("stable"), MANIFEST)
    assert read_channel(registry, "stable") == (digest, STATEMENT)
    assert read_channel(registry, "stable", digest) is None
    with pytest.raises(NotInRegistry, match="no channel canary"):
        read_channel(registry, "canary")


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(MANIFEST) | fields).encode()


LAYER = json.loads(MANIFEST)["layers"][0]
LARGE = blob_of(bytes(STATEMENT_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "manifest",
    [
        changed(artifactType="application/vnd.edgert.bundle.v1"),
        changed(layers=[]),
        changed(layers=[LAYER, LAYER]),
        changed(layers=[LAYER | {"digest": LARGE.digest, "size": LARGE.size_bytes}]),
    ],
)
def test_a_manifest_of_another_form_is_refused_as_a_channel(server: RegistryServer, manifest: bytes) -> None:
    server.registry().put_manifest(channel_tag("other"), manifest)
    with pytest.raises(RegistryCorrupt):
        read_channel(server.registry(), "other")


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        changed(layers={}),
        changed(layers=[{}]),
        changed(layers=["text"]),
        changed(layers=[LAYER | {"size": -1}]),
        changed(layers=[LAYER | {"size": True}]),
        changed(layers=[LAYER | {"size": 7.5}]),
        changed(layers=[LAYER | {"digest": 7}]),
        changed(layers=[LAYER | {"digest": "sha256:../../x"}]),
    ],
)
def test_a_manifest_that_no_registry_would_take_is_refused(manifest: bytes) -> None:
    with pytest.raises(RegistryCorrupt):
        statement_blob(manifest)
