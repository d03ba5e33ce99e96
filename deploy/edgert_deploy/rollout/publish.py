"""Puts a bundle into a registry as a release, in the form that edgert.registry.artifacts defines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgert.bundle.bundle_file import open_bundle
from edgert.errors import ConfigInvalid, NotInRegistry, RegistryUnreachable
from edgert.registry.address import digest_of
from edgert.registry.artifacts import EMPTY, blob_of, file_blob, release_manifest, release_tag
from edgert.registry.client import Blob, Registry
from edgert_deploy.common.temporary_folder import temporary_folder

PAUSES_S = (1.0, 2.0, 4.0)  # the pauses before a step is repeated after the link broke
PAUSE_S_MAX = 60.0  # the longest pause that the registry may require
_T = TypeVar("_T")

OnBytes = Callable[[int, int], object]  # arguments: the bytes sent so far, and their total
OnPause = Callable[[str], object]  # argument: a text about the failed step and the pause before the next attempt


@dataclass(frozen=True)
class SignedRelease:
    """The signed content of a release. `digest` is the SHA-256 of the content without the signatures."""

    model: str
    number: int
    digest: str
    envelope: bytes
    oci_manifest: bytes


@dataclass(frozen=True)
class Release:
    """A release of a model, or of the runtime, in a registry.

    Attributes:
        digest: The SHA-256 of the signed content.
        envelope: The SHA-256 of the envelope's blob.
        oci_manifest: The SHA-256 of the OCI manifest.
        sent_bytes: The size of the blobs that the registry lacked.
    """

    model: str
    number: int
    digest: str
    envelope: str
    oci_manifest: str
    files: tuple[Blob, ...]
    sent_bytes: int

    @property
    def tag(self) -> str:
        return release_tag(self.model, self.number)

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.files)

    def as_json(self) -> dict[str, str | int]:
        names: dict[str, str | int] = {
            "model": self.model,
            "release": self.number,
            "digest": self.digest,
            "tag": self.tag,
        }
        sizes = {"size_bytes": self.size_bytes, "sent_bytes": self.sent_bytes}
        return {**names, "manifest": f"sha256:{self.oci_manifest}", **sizes}


def publish(
    registry: Registry,
    path: Path,
    on_bytes: OnBytes = lambda sent, total: None,
    on_pause: OnPause = lambda text: None,
) -> Release:
    """Put the bundle at `path` into the registry. Raises BundleError, and the errors of `put_release`."""
    with open_bundle(path, trusted=None) as bundle, temporary_folder("publish") as folder:

        def unpacked(names: Sequence[str]) -> list[Path]:
            bundle.unpack(folder, frozenset(names))  # this verifies every byte before the first upload
            return [folder / name for name in names]

        manifest = bundle.manifest
        oci_manifest = release_manifest(manifest, bundle.envelope, bundle.digest)
        files = {file_blob(entry): entry.path for entry in manifest.files}
        signed = SignedRelease(manifest.model, manifest.release, bundle.digest, bundle.envelope.raw, oci_manifest)
        return put_release(registry, signed, files, unpacked, on_bytes, on_pause)


def put_release(
    registry: Registry,
    signed: SignedRelease,
    files: Mapping[Blob, str],
    paths_of: Callable[[Sequence[str]], Sequence[Path]],
    on_bytes: OnBytes,
    on_pause: OnPause,
) -> Release:
    """Put the files that the registry lacks into it, then the envelope and the manifest.

    If the registry has the release already, the release does not change, but files that the registry lost are sent
    again. A broken transfer is repeated.

    Args:
        files: The blobs of the release, each with a name for `paths_of`.
        paths_of: Returns the path on this host of each named file.
        on_pause: Called before the pause after a broken transfer.

    Raises ConfigInvalid if the registry has the release with other content, and RegistryError.
    """
    tag, sent = release_tag(signed.model, signed.number), 0
    try:
        published = _repeated(on_pause, registry.manifest, tag)
    except NotInRegistry:
        published = None
    if published is not None and published.digest != digest_of(signed.oci_manifest):
        raise ConfigInvalid(
            f"{registry.repository} has release {signed.number} of {signed.model} already, with other content or signed by another key. "
            "A release is immutable: give this release the next number"
        )
    lacking = {blob: name for blob, name in files.items() if not _repeated(on_pause, registry.has, blob)}
    total = sum(blob.size_bytes for blob in lacking)

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        on_bytes(sent, total)

    for blob, path in zip(lacking, paths_of(list(lacking.values())), strict=True):
        _repeated(on_pause, registry.upload, blob, path, count)
    _repeated(on_pause, put_small, registry, EMPTY, signed.envelope)
    if published is None:
        _repeated(on_pause, registry.put_manifest, tag, signed.oci_manifest)
    return Release(
        signed.model,
        signed.number,
        signed.digest,
        envelope=digest_of(signed.envelope).removeprefix("sha256:"),
        oci_manifest=digest_of(signed.oci_manifest).removeprefix("sha256:"),
        files=tuple(files),
        sent_bytes=total,
    )


def _repeated(on_pause: OnPause, step: Callable[..., _T], *given: object) -> _T:
    """Do a step of an upload. If the link breaks, repeat the step after each of PAUSES_S."""
    for pause_s in PAUSES_S:
        try:
            return step(*given)
        except RegistryUnreachable as error:
            wait_s = max(pause_s, min(error.retry_after_s or 0.0, PAUSE_S_MAX))
            on_pause(f"trying again in {wait_s:.0f} s: {error.message}")
            time.sleep(wait_s)
    return step(*given)


def put_small(registry: Registry, *contents: bytes) -> None:
    """Put those of `contents` that the registry lacks into it."""
    for content in contents:
        if not registry.has(blob_of(content)):
            registry.upload(blob_of(content), content)
