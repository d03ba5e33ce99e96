"""A version in a slot: read, compared with the installed content, ready to load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from edgert.bundle.envelope import ENVELOPE_NAME, parse_envelope
from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.config import DeviceConfig
from edgert.durable import os_error_as
from edgert.engines import LocalArtifact
from edgert.errors import BundleCorrupt, EdgeRTError, EngineFailed, ModelNotFound
from edgert.versions.slot_store import SlotStore

TRIED_CHARS_MAX = 2000  # an engine's error may contain the whole log of a compiler

T = TypeVar("T")


@dataclass(frozen=True)
class InstalledVersion:
    """A slot's content, ready to load: manifest, and this device's artifacts by preference.

    `reference` is the FP32 artifact for the comparison of live answers, if the bundle contains one.
    """

    manifest: Manifest
    digest: str
    folder: Path
    artifacts: tuple[ArtifactEntry, ...]
    reference: ArtifactEntry | None = None

    def local(self, artifact: ArtifactEntry) -> LocalArtifact:
        entry = self.manifest.file(artifact.entry)
        return LocalArtifact(
            engine=artifact.engine,
            path=self.folder / artifact.entry,
            inputs=self.manifest.inputs,
            outputs=self.manifest.outputs,
            sha256=entry.sha256,
            buckets=self.manifest.buckets,
        )


def load_live(store: SlotStore, config: DeviceConfig) -> InstalledVersion:
    """Read the live version's manifest. Raises BundleCorrupt; also ModelNotFound if no version is live."""
    slots = store.read()
    if slots.live is None:
        raise ModelNotFound(f"no version of model {store.folder.name} is live: deploy one first")
    return load_version(store.live_folder(slots), slots.live.digest, config)


def load_version(folder: Path, digest: str, config: DeviceConfig) -> InstalledVersion:
    """Read the manifest in `folder`. Raises BundleCorrupt unless the digest of the manifest is `digest`."""
    with os_error_as(BundleCorrupt, f"{folder} has no readable manifest", "deploy it again"):
        envelope = parse_envelope((folder / ENVELOPE_NAME).read_bytes())
    if envelope.digest != digest:
        raise BundleCorrupt(
            f"the manifest in {folder} changed since its install, so the disk may be faulty: deploy it again"
        )
    manifest = Manifest.from_bytes(envelope.payload)
    target = manifest.target_for(config.profile, config.machine)
    reference = manifest.artifact(target.reference) if target.reference else None
    artifacts = tuple(manifest.artifact(name) for name in target.artifacts)
    return InstalledVersion(manifest, digest, folder, artifacts, reference)


@dataclass(frozen=True)
class WorkingArtifact(Generic[T]):
    """The first artifact that works, the result of `use`, and the start of each earlier error."""

    artifact: ArtifactEntry
    value: T
    tried: tuple[str, ...]


def first_working(
    version: InstalledVersion, use: Callable[[ArtifactEntry], T], *, strict: bool = False
) -> WorkingArtifact[T]:
    """Pass the version's artifacts to `use`, in order of preference, until `use` raises no error.

    A lack of memory counts as an error of the artifact, because another artifact may need less. If no artifact works,
    raises the error of the last artifact. With `strict`, raises the error of the first artifact.
    """
    tried: list[str] = []
    for artifact in version.artifacts:
        try:
            return WorkingArtifact(artifact, use(artifact), tuple(tried))
        except EdgeRTError as error:
            failure = error
        except MemoryError:
            failure = EngineFailed(
                f"this device has too little free memory to load {artifact.id}: stop other programs, or give a smaller model"
            )
        tried.append(f"{artifact.id}: {failure.message[:TRIED_CHARS_MAX]}")
        if strict:
            break
    raise failure


def check_files(version: InstalledVersion, artifact: ArtifactEntry) -> None:
    """Compare the artifact's files with signed hashes, because flash memory decays. Raises BundleCorrupt."""
    for path in artifact.files:
        for _ in _checked_chunks(version, path):
            pass


def read_file(version: InstalledVersion, path: str) -> bytes:
    """Return a file of the version, compared with its signed hash. Raises BundleCorrupt."""
    return b"".join(_checked_chunks(version, path))


def _checked_chunks(version: InstalledVersion, path: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    file = version.folder / path
    with os_error_as(BundleCorrupt, f"{file} cannot be read", "deploy it again"), file.open("rb") as content:
        while chunk := content.read(1024**2):
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != version.manifest.file(path).sha256:
        raise BundleCorrupt(f"{file} changed on disk since its install: deploy it again")
