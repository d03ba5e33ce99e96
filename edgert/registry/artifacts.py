"""Releases and channels in a repository: OCI image manifests with their own media types.

A release is one manifest. The manifest has a layer for the signed envelope of the bundle, and a layer for each file.
The title of a file's layer is the file's path, as `oras` and `skopeo` expect. Releases share equal files. A channel is
a manifest with one layer, the signed statement. Manifests are not trusted. A device checks the statement's signature.
The statement has the digest of the envelope, and the envelope has the digest of each file. So a device does not read
the manifest of a release.

    MODEL-RELEASE    a release; edgert.runtime-RELEASE a release of the runtime, with a layer for each wheel
    channel.NAME     the newest statement of a channel; no model's name contains a dot

https://github.com/opencontainers/image-spec/blob/v1.1.1/manifest.md#guidelines-for-artifact-usage
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from edgert.bundle.channel import STATEMENT_BYTES_MAX
from edgert.bundle.envelope import ENVELOPE_NAME, Envelope
from edgert.errors import NotInRegistry, RegistryCorrupt
from edgert.registry.address import DIGEST, digest_of
from edgert.registry.client import MANIFEST_TYPE, Blob, Registry

if TYPE_CHECKING:  # a round without a new statement does not import edgert.bundle
    from edgert.bundle.manifest import FileEntry, Manifest
    from edgert.bundle.runtime_release import RuntimeRelease, Wheel

RELEASE_TYPE = "application/vnd.edgert.bundle.v1"
ENVELOPE_TYPE = "application/vnd.edgert.envelope.v1+json"
FILE_TYPE = "application/vnd.edgert.file.v1"
RUNTIME_TYPE = "application/vnd.edgert.runtime.v1"
CHANNEL_TYPE = "application/vnd.edgert.channel.v1"
STATEMENT_TYPE = "application/vnd.edgert.statement.v1+json"
EMPTY = b"{}"  # the configuration of an artifact without a configuration
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"


def release_tag(model: str, release: int) -> str:
    return f"{model}-{release}"


def channel_tag(channel: str) -> str:
    return f"channel.{channel}"


def blob_of(data: bytes) -> Blob:
    return Blob(digest_of(data), len(data))


def file_blob(entry: FileEntry | Wheel) -> Blob:
    """Return the blob of a bundle's file, or of a runtime's wheel."""
    return Blob(f"sha256:{entry.sha256}", entry.size_bytes)


def release_manifest(manifest: Manifest, envelope: Envelope, digest: str) -> bytes:
    """Return the OCI manifest of the bundle with this `digest`. A bundle always gives the same bytes."""
    layers = [_layer(blob_of(envelope.raw), ENVELOPE_TYPE, ENVELOPE_NAME)]
    layers += [_layer(file_blob(entry), FILE_TYPE, entry.path) for entry in manifest.files]
    annotations = {
        "org.opencontainers.image.version": str(manifest.release),
        "edgert.model": manifest.model,
        "edgert.release": str(manifest.release),
        "edgert.targets": ",".join(target.profile for target in manifest.targets),
        "edgert.digest": digest,
        "edgert.keys": ",".join(envelope.key_ids),
    }
    return _manifest(RELEASE_TYPE, layers, annotations)


def runtime_manifest(release: RuntimeRelease, envelope: bytes) -> bytes:
    """Return the manifest of a release of the runtime: its envelope, and each wheel once."""
    wheels = {wheel.sha256: wheel for target in release.targets for wheel in target.wheels}
    layers = [_layer(blob_of(envelope), ENVELOPE_TYPE, "runtime.dsse.json")]
    layers += [_layer(file_blob(wheel), FILE_TYPE, wheel.name) for wheel in wheels.values()]
    annotations = {
        "org.opencontainers.image.version": release.edgert,
        "edgert.release": str(release.release),
        "edgert.targets": ",".join(f"python{t.python}-{t.machine}" for t in release.targets),
    }
    return _manifest(RUNTIME_TYPE, layers, annotations)


def channel_manifest(statement: bytes, channel: str, counter: int, expires: str) -> bytes:
    annotations = {"edgert.channel": channel, "edgert.counter": str(counter), "edgert.expires": expires}
    return _manifest(CHANNEL_TYPE, [_layer(blob_of(statement), STATEMENT_TYPE, "channel.dsse.json")], annotations)


def read_channel(registry: Registry, channel: str, known: str = "") -> tuple[str, bytes] | None:
    """Return the digest of a channel's manifest, and its signed statement; None if the digest is `known`.

    The caller verifies the statement (edgert.bundle.channel). Raises NotInRegistry, RegistryError.
    """
    try:
        fetched = registry.manifest(channel_tag(channel), known)
    except NotInRegistry as error:
        raise NotInRegistry(
            f"{registry.repository} has no channel {channel}: check both names; edgert publish BUNDLE --channel {channel} "
            "starts the channel"
        ) from error
    if fetched is None:
        return None
    try:
        blob = statement_blob(fetched.data)
    except RegistryCorrupt as error:
        raise RegistryCorrupt(f"channel {channel} in {registry.repository}: {error.message}") from error
    return fetched.digest, registry.read(blob, STATEMENT_BYTES_MAX)


def statement_blob(data: bytes) -> Blob:
    """Return the blob of the statement that a channel's manifest names. Raises RegistryCorrupt."""
    try:
        value = json.loads(data)
        (layer,) = value["layers"]
        blob = Blob(layer["digest"], layer["size"])
        fits = type(blob.size_bytes) is int and 0 <= blob.size_bytes <= STATEMENT_BYTES_MAX
        if value["artifactType"] == CHANNEL_TYPE and DIGEST.fullmatch(blob.digest) and fits:
            return blob
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RegistryCorrupt(f"its manifest cannot be read: {type(error).__name__}") from error
    raise RegistryCorrupt("its manifest is not a channel's manifest: another program wrote this tag")


def _layer(blob: Blob, media_type: str, title: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size_bytes, "annotations": {_TITLE: title}}


def _manifest(artifact_type: str, layers: list[dict[str, Any]], annotations: dict[str, str]) -> bytes:
    empty = blob_of(EMPTY)
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": {"mediaType": _EMPTY_TYPE, "digest": empty.digest, "size": empty.size_bytes},
        "layers": layers,
        "annotations": annotations,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
