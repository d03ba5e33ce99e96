"""Fetches from the registry the files of a release that this device lacks.

The fetcher does not trust the registry. The signed statement names the envelope by its SHA-256; the envelope is also
signed, and names the SHA-256 and the size of each file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgert.bundle.bundle_file import ENVELOPE_BYTES_MAX
from edgert.bundle.channel import Entry
from edgert.bundle.delta import Delta, open_delivery, write_delta
from edgert.bundle.envelope import parse_envelope
from edgert.bundle.expiry import check_expiry
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.bundle.signing import PublicKey
from edgert.config import DeviceConfig
from edgert.durable import check_free, replacing, sha256_of, storing
from edgert.errors import BundleError, ChannelMismatch, ReleaseTooOld
from edgert.follow.pace import Pace
from edgert.registry.artifacts import file_blob
from edgert.registry.client import Blob, Registry
from edgert.state_dir import StateDir
from edgert.versions.install import SPARE_BYTES, fetched_path, held_files
from edgert.versions.slots import Slots


class ReleaseFetcher:
    """Fetches releases to STATE/incoming. Incomplete files stay there for the next attempt."""

    def __init__(self, registry: Registry, state: StateDir, config: DeviceConfig, pace: Pace) -> None:
        self._registry = registry
        self._state = state
        self._config = config
        self._pace = pace

    def fetch(self, entry: Entry, slots: Slots, trusted: tuple[PublicKey, ...], now_s: float) -> Path:
        """Fetch the files of a release that this device lacks.

        Return the path of a delta for `edgertd install`. Raises RegistryError, StorageFailed and WindowClosed. Raises
        BundleError and ChannelMismatch if the release cannot be installed here. `now_s` is the latest known time.
        """
        self._pace.check()
        path = self._delivery(entry.model)
        manifest = _held_manifest(path, entry, trusted)
        if manifest is None:
            data = self._registry.read(Blob(f"sha256:{entry.envelope}", ENVELOPE_BYTES_MAX), ENVELOPE_BYTES_MAX)
            manifest = _signed_manifest(data, entry, trusted)
            with storing(f"cannot write {path}"), replacing(path) as out:
                write_delta(out, data, [])  # without parts: the slots have the files, or the code below fetches them
        _check_fits(manifest, slots, now_s)
        files = manifest.files_for(manifest.target_for(self._config.profile, self._config.machine))
        lacking = self._lacking(manifest.model, files)
        self._remove_others(manifest.model, {path, *(self._fetched(manifest, file) for file in lacking)})
        self._check_space(manifest, files, lacking)
        for file in lacking:
            self._pace.check()
            self._registry.download(file_blob(file), self._fetched(manifest, file), self._pace.count_bytes)
        return path

    def remove(self, model: str) -> None:
        """Remove the fetched files of a release that is installed or refused."""
        self._remove_others(model, set())

    def _delivery(self, model: str) -> Path:
        return self._state.incoming / f"{model}.channel.part"

    def _fetched(self, manifest: Manifest, file: FileEntry) -> Path:
        return fetched_path(self._state, manifest.model, file.sha256)

    def _lacking(self, model: str, wanted: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files to fetch, one for each content. A damaged file in a slot is fetched again."""
        files = {file.sha256: file for file in wanted}
        held = {sha256: path for sha256, path in held_files(self._state, model).items() if sha256 in files}
        return [file for sha256, file in files.items() if sha256 not in held or _sha256(held[sha256]) != sha256]

    def _check_space(self, manifest: Manifest, wanted: Sequence[FileEntry], lacking: Sequence[FileEntry]) -> None:
        fetched_bytes = sum(
            path.stat().st_size for file in lacking if (path := self._fetched(manifest, file)).is_file()
        )
        needed_bytes = sum(file.size_bytes for file in (*wanted, *lacking)) - fetched_bytes + SPARE_BYTES
        check_free(self._state.root, needed_bytes, f"release {manifest.release} of {manifest.model}")

    def _remove_others(self, model: str, wanted: set[Path]) -> None:
        """Remove a model's fetched files, except `wanted`. If a removal fails, the next round tries again."""
        for path in (self._delivery(model), *self._state.incoming.glob(fetched_path(self._state, model, "*").name)):
            if path not in wanted:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _held_manifest(path: Path, entry: Entry, trusted: tuple[PublicKey, ...]) -> Manifest | None:
    """Return the manifest in a delivery that an earlier attempt wrote for the same entry."""
    try:
        with open_delivery(path, trusted, lambda _: {}) as opened:
            if isinstance(opened, Delta) and hashlib.sha256(opened.envelope.raw).hexdigest() == entry.envelope:
                return _checked(opened.manifest, opened.digest, entry)
    except BundleError:  # there is no delivery, or the delivery is of another release
        pass
    return None


def _signed_manifest(data: bytes, entry: Entry, trusted: tuple[PublicKey, ...]) -> Manifest:
    envelope = parse_envelope(data)
    envelope.verify(trusted)
    return _checked(Manifest.from_bytes(envelope.payload), envelope.digest, entry)


def _checked(manifest: Manifest, digest: str, entry: Entry) -> Manifest:
    if (manifest.model, manifest.release, digest) != (entry.model, entry.release, entry.digest):
        raise ChannelMismatch(
            f"the channel names release {entry.release} of {entry.model}, but its bundle is release {manifest.release} "
            f"of {manifest.model} or has other content: publish it again"
        )
    return manifest


def _check_fits(manifest: Manifest, slots: Slots, now_s: float) -> None:
    """Raise the errors of an install before the download, not after it."""
    name = f"release {manifest.release} of {manifest.model}"
    check_expiry(manifest.expires, name, now_s)
    if not manifest.may_follow(slots.ratchet):
        raise ReleaseTooOld(
            f"{name} is older than {slots.ratchet}, which was live here: publish this version as a higher release"
        )


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return ""
