"""What is sent to a device of a bundle: the files that it lacks, packed as small as the device can read.

A file goes as a patch of the version that the device has where this host has that version too (what it shipped
before, or was shown by --delta-from); else compressed where that helps; else as it is. How a parcel is made depends only
on the bundle, on what the device has and on what it can read: devices of one kind get the very same file, made once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

from edgert.bundle import Bundle, open_bundle
from edgert.errors import DeviceError
from edgert.manifest import FileEntry, Manifest, TargetEntry
from edgert.parcel import PATCH_BYTES_MAX, WINDOW_BYTES_MAX, Part, write_parcel
from edgert_deploy.objects import ObjectCache
from edgert_deploy.wheelhouse import cache_folder

FORMAT = 1
PATCH_LEVEL = 19  # lower ones search a dictionary too little to find what moved (docs/decisions/0010)
WHOLE_LEVEL = 9
_COMPRESSED_AT_MOST = 0.98  # else it is not worth the unpacking


@dataclass(frozen=True)
class Has:
    """What a device answered to `edgertd have`: its files as (path, SHA-256), the active version's first."""

    files: tuple[tuple[str, str], ...] = ()
    zstd: bool = False
    patch_bytes_max: int = 0

    @classmethod
    def from_answer(cls, value: Mapping[str, Any]) -> Has:
        """Raises DeviceError when `value` is no answer to `edgertd have`."""
        try:
            files = tuple((str(file["path"]), str(file["sha256"])) for file in value["files"])
            return cls(files, bool(value["zstd"]), min(int(value["patch_bytes_max"]), PATCH_BYTES_MAX))
        except (KeyError, TypeError, ValueError) as error:
            raise DeviceError(f"the device's answer to `edgertd have` cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Shipment:
    """A parcel's file. `whole_bytes` is all that the device's target needs, `files` how many these are; of them `had`
    need not be sent and `patched` go as patches."""

    path: Path
    size_bytes: int
    whole_bytes: int
    files: int
    had: int
    patched: int

    def described(self) -> str:
        notes = [f"{self.had} of {self.files} files are there already"] if self.had else []
        notes += [f"{self.patched} {'goes as a patch' if self.patched == 1 else 'go as patches'}"] * bool(self.patched)
        return f"{_mb(self.size_bytes)} for {_mb(self.whole_bytes)}" + (f": {', '.join(notes)}" if notes else "")


def lacking(manifest: Manifest, target: TargetEntry, had: Collection[str]) -> list[FileEntry]:
    """The files that a device of `target` needs and whose SHA-256 is not in `had`; the same content once."""
    wanted = {entry.sha256: entry for entry in manifest.files_for(target)}
    return [entry for sha256, entry in wanted.items() if sha256 not in had]


@dataclass(frozen=True)
class Parcels:
    """Makes parcels, and keeps them and what they were made of. Several threads may ask."""

    folder: Path = field(default_factory=lambda: cache_folder() / "transfer")
    _making: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    @property
    def objects(self) -> ObjectCache:
        return ObjectCache(self.folder / "objects")

    def make(self, path: Path, target: TargetEntry, has: Has) -> Shipment:
        """The parcel of the bundle at `path` for a device. Raises BundleError, and OSError where the cache is not
        writable."""
        with open_bundle(path, trusted=None) as bundle:
            new = lacking(bundle.manifest, target, {sha256 for _, sha256 in has.files})
            bases = self._bases(new, has)
            key = _key(bundle, new, bases, has)
            with self._making[key]:
                made = ObjectCache(self.folder / "parcels")
                file = made.find(key) or self._make(bundle, new, bases, has, made, key)
        files = bundle.manifest.files_for(target)
        parts = json.loads((file.parent / f"{key}.json").read_bytes())
        whole = sum(entry.size_bytes for entry in files)
        had = sum(entry.sha256 not in {each.sha256 for each in new} for entry in files)
        return Shipment(file, file.stat().st_size, whole, len(files), had, parts["patched"])

    def _bases(self, new: Sequence[FileEntry], has: Has) -> dict[str, str]:
        """SHA-256 of a new file -> that of the old one it is patched from: of the same path, else of the same name."""
        bases = {}
        for entry in new:
            if not has.zstd or not 0 < entry.size_bytes <= has.patch_bytes_max:
                continue
            name = PurePosixPath(entry.path).name
            old = [sha256 for path, sha256 in has.files if path == entry.path]
            old += [sha256 for path, sha256 in has.files if PurePosixPath(path).name == name]
            for sha256 in old:
                content = self.objects.find(sha256)
                if content is not None and 0 < content.stat().st_size <= has.patch_bytes_max:
                    bases[entry.sha256] = sha256
                    break
        return bases

    def _make(
        self, bundle: Bundle, new: Sequence[FileEntry], bases: Mapping[str, str], has: Has, made: ObjectCache, key: str
    ) -> Path:
        with made.workshop() as shop:
            unpacked = Path(shop) / "files"
            unpacked.mkdir()
            bundle.unpack(unpacked, frozenset(entry.path for entry in new))
            parts = []
            for number, entry in enumerate(new):
                base = self.objects.read(bases[entry.sha256]) if entry.sha256 in bases else None
                parts.append(_packed(entry, unpacked / entry.path, base, bases, has, Path(shop) / str(number)))
            with (Path(shop) / "parcel").open("wb") as out:
                write_parcel(out, bundle.envelope.raw, parts)
            note = {"patched": sum(part.how == "patch" for part, _ in parts)}
            (Path(shop) / "note").write_text(json.dumps(note))
            made.keep(f"{key}.json", Path(shop) / "note")
            self.objects.keep_files(new, unpacked)
            return made.keep(key, Path(shop) / "parcel")


def _packed(
    entry: FileEntry, path: Path, base: bytes | None, bases: Mapping[str, str], has: Has, out: Path
) -> tuple[Part, Path]:
    """The smallest of patch, compressed and as it is."""
    if base is not None:
        out.write_bytes(_patch(path.read_bytes(), base))
        if out.stat().st_size < entry.size_bytes / 2:
            return Part(entry.sha256, "patch", out.stat().st_size, bases[entry.sha256]), out
    patch_bytes = out.stat().st_size if base is not None else entry.size_bytes
    if has.zstd:
        whole = out.with_suffix(".whole")
        with path.open("rb") as source, whole.open("wb") as target:
            zstandard.ZstdCompressor(level=WHOLE_LEVEL).copy_stream(source, target, size=entry.size_bytes)
        if whole.stat().st_size < min(patch_bytes, entry.size_bytes * _COMPRESSED_AT_MOST):
            return Part(entry.sha256, "zstd", whole.stat().st_size), whole
    if patch_bytes < entry.size_bytes * _COMPRESSED_AT_MOST:
        return Part(entry.sha256, "patch", patch_bytes, bases[entry.sha256]), out
    return Part(entry.sha256, "raw", entry.size_bytes), path


def _patch(new: bytes, old: bytes) -> bytes:
    """As `zstd -19 --patch-from` does it: the old content is a dictionary, the window spans both."""
    known = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    window = min((len(old) + len(new)).bit_length(), WINDOW_BYTES_MAX.bit_length() - 1)
    settings = zstandard.ZstdCompressionParameters.from_level(
        PATCH_LEVEL, window_log=max(window, 10), enable_ldm=True, source_size=len(new), dict_size=len(old)
    )
    return zstandard.ZstdCompressor(dict_data=known, compression_params=settings).compress(new)


def _key(bundle: Bundle, new: Sequence[FileEntry], bases: Mapping[str, str], has: Has) -> str:
    """What a parcel's bytes depend on."""
    words = [FORMAT, zstandard.__version__, hashlib.sha256(bundle.envelope.raw).hexdigest(), has.zstd]
    words += [[entry.sha256, bases.get(entry.sha256, "")] for entry in new]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB" if size_bytes < 10e6 else f"{size_bytes / 1e6:.1f} MB"
