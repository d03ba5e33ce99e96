"""Installs a bundle into a model's spare slot: verify it, check that it fits, unpack it, record it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.bundle.bundle_file import Bundle
from edgert.bundle.delta import Delta, open_delivery
from edgert.bundle.envelope import ENVELOPE_NAME, parse_envelope
from edgert.bundle.expiry import check_expiry, expiry_time
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.config import DeviceConfig
from edgert.durable import check_free, storing, sync_file
from edgert.engines import EngineOptions, prepare
from edgert.errors import (
    BundleError,
    ConfigInvalid,
    EdgeRTError,
    EngineFailed,
    EngineMissing,
    ReleaseTooOld,
    TransitionRefused,
)
from edgert.extras import check_tokenizers
from edgert.state_dir import LEARNED_NAME_CHARS, StateDir
from edgert.versions.installed import InstalledVersion, load_version
from edgert.versions.latest_time import LatestTime
from edgert.versions.slot_store import STAGE_NAME, SlotStore
from edgert.versions.slots import SLOT_NAMES, Slots, Version
from edgert.versions.trust import trusted_keys

SPARE_BYTES = 16 * 1024**2  # the free space that must remain for state, logs and the spool


@dataclass(frozen=True)
class InstallResult:
    """The result of an install. If `already_live`, exactly this content serves, and nothing was installed."""

    model: str
    release: int
    digest: str
    already_live: bool


def install(
    path: Path,
    state: StateDir,
    config: DeviceConfig,
    progress: Callable[[str], None] = lambda _: None,
    latest: LatestTime | None = None,
) -> InstallResult:
    """Verify the bundle or delta at `path`, and store this device's part of it in the model's spare slot.

    The live version continues to serve. The version for a rollback stays until the whole bundle is verified and on
    disk. Raises BundleError and its subclasses, StorageFailed, TransitionRefused, EngineFailed, and ConfigInvalid.
    `latest` is the time for the check of the expiry; by default, the latest time that this device has seen.
    """
    ring = trusted_keys(state)
    for warning in ring.warnings:
        progress(warning)
    trusted = ring.trusted
    if not trusted:
        raise ConfigInvalid(f"{state.keys} contains no public key: run edgert bootstrap from the host")
    with open_delivery(path, trusted, lambda manifest: _present_files(state, manifest)) as bundle:
        manifest = bundle.manifest
        target = manifest.target_for(config.profile, config.machine)
        if manifest.text is not None:
            check_tokenizers()
        latest = latest or LatestTime(state)
        check_expiry(manifest.expires, f"release {manifest.release} of {manifest.model}", latest.now_s())
        store = SlotStore(state.models / manifest.model)
        with store.installing():
            before = store.read()
            if before.live is not None and before.live.digest == bundle.digest:
                bundle.verify_files()  # refuses a damaged copy even if there is nothing to install
                return InstallResult(manifest.model, manifest.release, bundle.digest, already_live=True)
            _check_release(manifest, bundle.digest, before)
            if manifest.signed_at:
                latest.store(expiry_time(manifest.signed_at))
            store.collect()  # this line and the next line free space before `_unpack` checks the free space
            _remove_unused(state, manifest, bundle.digest)
            _unpack(bundle, manifest.files_for(target), store.folder / STAGE_NAME, progress)
            _prepare(load_version(store.folder / STAGE_NAME, bundle.digest, config), state, config, progress)
            with store.locked():
                _check_release(manifest, bundle.digest, store.read())  # another command may have kept a version since
                store.put_staged(Version(manifest.release, bundle.digest, good=False))
    return InstallResult(manifest.model, manifest.release, bundle.digest, already_live=False)


def fetched_path(state: StateDir, model: str, sha256: str) -> Path:
    """Return the path, by the content's hash, of a file that the follower fetches for the next install."""
    return state.incoming / f"{model}.{sha256}.fetched.part"  # a model's name has no dot


def held_files(state: StateDir, model: str) -> dict[str, Path]:
    """Return the files of a model's versions by the SHA-256 in their manifests.

    If two versions have the same file, the file of the live version is returned. This function does not compute any
    hash: the reader of a file compares the hash.
    """
    store = SlotStore(state.models / model)
    files = dict[str, Path]()
    slots = store.read()
    for slot in dict.fromkeys((slots.live_slot or slots.spare_slot, *SLOT_NAMES)):
        if slots.version(slot) is None:
            continue
        folder = store.slot_folder(slot)
        try:
            manifest = Manifest.from_bytes(parse_envelope((folder / ENVELOPE_NAME).read_bytes()).payload)
        except (OSError, BundleError):  # the version's files cannot be used
            continue
        for entry in manifest.files:
            path = folder / entry.path
            if path.is_file() and path.stat().st_size == entry.size_bytes:
                files.setdefault(entry.sha256, path)
    return files


def _present_files(state: StateDir, manifest: Manifest) -> dict[str, Path]:
    """Return the present files of `manifest`: fetched files, else files of the model's versions."""
    present = held_files(state, manifest.model)
    for entry in manifest.files:
        path = fetched_path(state, manifest.model, entry.sha256)
        if path.is_file() and path.stat().st_size == entry.size_bytes:
            # the size is right, so the follower has fetched the whole file
            present[entry.sha256] = path
    return present


def _check_release(manifest: Manifest, digest: str, slots: Slots) -> None:
    if slots.on_trial:  # the table of transitions would also refuse, but only after minutes of unpacking
        raise TransitionRefused("a version is on trial: end it first with edgertd mark-good or edgertd rollback")
    if not manifest.may_follow(slots.ratchet):
        raise ReleaseTooOld(
            f"release {manifest.release} of {manifest.model} is older than {slots.ratchet}, which was live here: "
            f"build with --release {slots.ratchet + 1}, or sign a downgrade with --downgrade-from {slots.ratchet}"
        )
    for version in (slots.a, slots.b):
        if version is not None and version.good and version.release == manifest.release and version.digest != digest:
            raise BundleError(
                f"release {manifest.release} of {manifest.model} is installed with other content: "
                f"build with --release {max(slots.ratchet, manifest.release) + 1}"
            )


def _remove_unused(state: StateDir, manifest: Manifest, digest: str) -> None:
    """Remove compiled files and measurements that neither `manifest` nor a version on this device uses.

    Their names start with the hash of an artifact's file or of a version.
    """
    used = {digest, *(entry.sha256 for entry in manifest.files)}
    with contextlib.suppress(BundleError, OSError):  # if a manifest cannot be read, the used files are not known
        for path in state.models.glob(f"*/*/{ENVELOPE_NAME}"):
            envelope = parse_envelope(path.read_bytes())
            used |= {envelope.digest, *(entry.sha256 for entry in Manifest.from_bytes(envelope.payload).files)}
        used = {sha256[:LEARNED_NAME_CHARS] for sha256 in used}
        for path in (*state.cache.glob("*"), *state.learned.glob("*")):
            name = path.name.lstrip(".")[:LEARNED_NAME_CHARS]
            if len(name) == LEARNED_NAME_CHARS and not name.strip("0123456789abcdef") and name not in used:
                shutil.rmtree(path, ignore_errors=True)  # does nothing if `path` is a file
                path.unlink(missing_ok=True)


def _unpack(bundle: Bundle | Delta, files: Sequence[FileEntry], stage: Path, progress: Callable[[str], None]) -> None:
    manifest = bundle.manifest
    needed_bytes = sum(entry.size_bytes for entry in files) + SPARE_BYTES
    check_free(stage.parent, needed_bytes, f"release {manifest.release} of {manifest.model}")
    progress(f"unpacking release {manifest.release} of {manifest.model}")
    try:
        with storing(f"cannot write into {stage}"):
            stage.mkdir()
            with (stage / ENVELOPE_NAME).open("xb") as file:
                file.write(bundle.envelope.raw)
                sync_file(file)
        bundle.unpack(stage, frozenset(entry.path for entry in files))
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _prepare(version: InstalledVersion, state: StateDir, config: DeviceConfig, progress: Callable[[str], None]) -> None:
    """Let each engine compile its artifact while the old version still serves.

    An engine that fails is skipped, like at the load of the version. Raises the first error if all engines fail. With
    `strict` in the configuration, raises the error of the first engine that fails.
    """
    options = EngineOptions(cache_dir=state.cache)
    failures: list[EdgeRTError] = []
    for artifact in version.artifacts:
        try:
            prepare(version.local(artifact), options, progress)
        except (EngineMissing, EngineFailed) as error:
            if config.serving.strict:
                raise
            failures.append(error)
            progress(f"{artifact.id} cannot serve here: {error.message}")
    if len(failures) == len(version.artifacts):
        raise failures[0]
    if version.reference is not None:
        prepare(version.local(version.reference), options, progress)
