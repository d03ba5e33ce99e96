"""From a bundle to a release in a registry. See edgert.registry.artifacts for its form there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgert.bundle.bundle_file import Bundle, open_bundle
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.errors import ConfigInvalid, NotInRegistry
from edgert.registry.address import digest_of
from edgert.registry.artifacts import EMPTY, blob_of, file_blob, release_manifest, release_tag
from edgert.registry.client import Registry

OnBytes = Callable[[int, int], object]  # those sent so far, and all


@dataclass(frozen=True)
class Release:
    """A release in a registry. `digest` is the bundle's; the others are the SHA-256 of the envelope and OCI manifest."""

    manifest: Manifest
    digest: str
    envelope: str
    oci_manifest: str
    sent_bytes: int
    size_bytes: int

    @property
    def tag(self) -> str:
        return release_tag(self.manifest.model, self.manifest.release)


def publish(registry: Registry, path: Path, on_bytes: OnBytes = lambda sent, total: None) -> Release:
    """Put the bundle at `path` into the registry: the files that it lacks, then the release's manifest.

    A release that is there already stays as it is. Raises ConfigInvalid where that has other content, BundleError and
    RegistryError.
    """
    with open_bundle(path, trusted=None) as bundle:
        data = release_manifest(bundle.manifest, bundle.envelope, bundle.digest)
        there = _there(registry, bundle)
        if there is not None and there != digest_of(data):
            raise ConfigInvalid(
                f"{registry.repository} has release {bundle.manifest.release} of {bundle.manifest.model} already, with "
                "other content. A release is immutable: build this one with the next number"
            )
        sent_bytes = 0 if there else _send(registry, bundle, data, on_bytes)
        return Release(
            bundle.manifest,
            bundle.digest,
            digest_of(bundle.envelope.raw).removeprefix("sha256:"),
            digest_of(data).removeprefix("sha256:"),
            sent_bytes,
            sum(entry.size_bytes for entry in bundle.manifest.files),
        )


def put_small(registry: Registry, *contents: bytes) -> None:
    """Put the contents that the registry lacks."""
    for content in contents:
        if not registry.has(blob_of(content)):
            registry.upload(blob_of(content), content)


def _there(registry: Registry, bundle: Bundle) -> str | None:
    """Return the digest of the manifest that has the release's tag; None where there is none."""
    try:
        fetched = registry.manifest(release_tag(bundle.manifest.model, bundle.manifest.release))
    except NotInRegistry:
        return None
    return None if fetched is None else fetched.digest


def _send(registry: Registry, bundle: Bundle, data: bytes, on_bytes: OnBytes) -> int:
    """Send what the registry lacks and the manifest; return the bytes of the files that were sent."""
    lacking: dict[str, FileEntry] = {}
    for entry in bundle.manifest.files:
        if entry.sha256 not in lacking and not registry.has(file_blob(entry)):
            lacking[entry.sha256] = entry
    total = sum(entry.size_bytes for entry in lacking.values())
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        on_bytes(sent, total)

    with tempfile.TemporaryDirectory(prefix="edgert-publish-") as folder:
        # Every byte of the bundle is verified before any leaves this host.
        bundle.unpack(Path(folder), frozenset(entry.path for entry in lacking.values()))
        for entry in lacking.values():
            registry.upload(file_blob(entry), Path(folder) / entry.path, count)
    put_small(registry, EMPTY, bundle.envelope.raw)
    registry.put_manifest(release_tag(bundle.manifest.model, bundle.manifest.release), data)
    return total
