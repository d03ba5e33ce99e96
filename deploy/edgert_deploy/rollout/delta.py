"""Deltas: the files of a bundle that a device lacks, in the smallest form that the device can read.

A file is sent as a patch if both the device and this host have an older version of the file. This host has the versions
that it sent before, and those given by --delta-from. Otherwise the file is compressed if this makes it smaller. A delta
depends only on the bundle, the device's files and the formats that the device can read. So devices of one kind get the
same delta, which is made once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

from edgert.bundle.bundle_file import Bundle, open_bundle
from edgert.bundle.delta import PATCH_BYTES_MAX, WINDOW_BYTES_MAX, Part, parts_of, write_delta
from edgert.bundle.manifest import FileEntry, Manifest, TargetEntry
from edgert.errors import DeviceError
from edgert.printable import counted
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.common.quantities import size_text

FORMAT = 2
CACHE_BYTES_MAX = 2 * 1024**3  # for the files, and for the deltas
PATCH_LEVEL = 9  # level 19 takes 6 to 13 times as long and makes no smaller patch (docs/decisions/0010)
WINDOW_LOG_MIN = 10  # the smallest window of zstd
WHOLE_LEVEL = 9
_GOOD_PATCH_SHARE = 0.5  # a patch below this share of the file is good, so compression of the whole file is not tried
_COMPRESSED_SHARE_MAX = 0.98  # a form above this share of the file is not worth the time of its decompression


@dataclass(frozen=True)
class DeviceFiles:
    """The files of a model that a device has, and the formats that the device can read.

    Each of `files` is (path, SHA-256). The files of the live version come first.
    """

    files: tuple[tuple[str, str], ...] = ()
    zstd: bool = False
    patch_bytes_max: int = 0

    @classmethod
    def from_answer(cls, value: Mapping[str, Any]) -> DeviceFiles:
        """Read the answer of `edgertd list-files`. Raises DeviceError."""
        try:
            files = tuple((str(file["path"]), str(file["sha256"])) for file in value["files"])
            return cls(files, bool(value["zstd"]), min(int(value["patch_bytes_max"]), PATCH_BYTES_MAX))
        except (KeyError, TypeError, ValueError) as error:
            raise DeviceError(f"the device's answer to `edgertd list-files` cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Delta:
    """A delta on disk.

    Attributes:
        whole_bytes: The size of all files that the device's target needs.
        files: The number of files that the device's target needs.
        had: The number of these files that the device has.
        patched: The number of these files that the delta sends as patches.
    """

    path: Path
    size_bytes: int
    whole_bytes: int
    files: int
    had: int
    patched: int

    def described(self) -> str:
        notes = [f"{self.had} of {counted(self.files, 'file')} on the device already"] if self.had else []
        notes += [f"{self.patched} as {'a patch' if self.patched == 1 else 'patches'}"] * bool(self.patched)
        return f"{size_text(self.size_bytes)} for {size_text(self.whole_bytes)}" + (
            f": {', '.join(notes)}" if notes else ""
        )


def lacking(manifest: Manifest, target: TargetEntry, had: Collection[str]) -> list[FileEntry]:
    """Return the files that `target` needs and whose SHA-256 is not in `had`. Each content appears once."""
    files = {entry.sha256: entry for entry in manifest.files_for(target)}
    return [entry for sha256, entry in files.items() if sha256 not in had]


def predecessors(entry: FileEntry, old: Sequence[tuple[str, str]]) -> list[str]:
    """Return the SHA-256 of each old file that may be an older version of `entry`.

    Files with the same path come first, then files with the same name in another folder.
    """
    name = PurePosixPath(entry.path).name
    same_path = [sha256 for path, sha256 in old if path == entry.path]
    return same_path + [sha256 for path, sha256 in old if path != entry.path and PurePosixPath(path).name == name]


def smallest_form(
    entry: FileEntry, path: Path, base: tuple[str, bytes] | None, zstd: bool, out: Path
) -> tuple[Part, Path]:
    """Return the file at `path` as a patch, compressed, or unchanged, and its description.

    A patch needs the old file `base`, which is (SHA-256, content). The file of each form is named `out` with a suffix.
    """
    options = [(Part(entry.sha256, "raw", entry.size_bytes), path)]
    if base is not None:
        patch = out.with_suffix(".patch")
        patch.write_bytes(make_patch(path.read_bytes(), base[1]))
        options.append((Part(entry.sha256, "patch", patch.stat().st_size, base[0]), patch))
    if zstd and options[-1][0].size_bytes > entry.size_bytes * _GOOD_PATCH_SHARE:
        whole = out.with_suffix(".zst")
        with path.open("rb") as source, whole.open("wb") as target:
            zstandard.ZstdCompressor(level=WHOLE_LEVEL).copy_stream(source, target, size=entry.size_bytes)
        options.append((Part(entry.sha256, "zstd", whole.stat().st_size), whole))
    best = min(options, key=lambda option: option[0].size_bytes)
    return best if best[0].size_bytes < entry.size_bytes * _COMPRESSED_SHARE_MAX else options[0]


@dataclass(frozen=True)
class Deltas:
    """Makes deltas. Caches the deltas and the files in them, by SHA-256. Threads may share one object."""

    folder: Path = field(default_factory=lambda: cache_folder() / "transfer")
    _making: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    @property
    def files(self) -> FileCache:
        return FileCache(self.folder / "sent-files", CACHE_BYTES_MAX)

    @property
    def _deltas(self) -> FileCache:
        return FileCache(self.folder / "made-deltas", CACHE_BYTES_MAX)

    def keep_bundle(self, path: Path) -> None:
        """Cache the files of a bundle, to make patches from them. Raises BundleError, and OSError."""
        with self._temporary_folder() as folder, open_bundle(path, trusted=None) as bundle:
            bundle.unpack(Path(folder), frozenset(entry.path for entry in bundle.manifest.files))
            self._keep_files(bundle.manifest.files, Path(folder))

    def make(self, path: Path, target: TargetEntry, has: DeviceFiles) -> Delta:
        """Return the delta of the bundle at `path` for a device that `has` some files.

        Raises BundleError, and OSError if the cache fails.
        """
        with open_bundle(path, trusted=None) as bundle:
            new = lacking(bundle.manifest, target, {sha256 for _, sha256 in has.files})
            bases = self._bases(new, has)
            key = _key(bundle, new, bases, has)
            with self._making[key]:
                found = self._deltas.find(key)
                if not found:
                    self._make(key, bundle, new, bases, zstd=has.zstd)
                    found = self._deltas.find(key)
        if not found:
            raise OSError(errno.ENOSPC, "no room for it")
        file = found[0]
        files = bundle.manifest.files_for(target)
        patched = sum(part.encoding == "patch" for part in parts_of(file))
        whole = sum(entry.size_bytes for entry in files)
        had = sum(entry.sha256 not in {each.sha256 for each in new} for entry in files)
        return Delta(file, file.stat().st_size, whole, len(files), had, patched)

    def _bases(self, new: Sequence[FileEntry], has: DeviceFiles) -> dict[str, str]:
        """Return the old file for each new file that is sent as a patch. Keys and values are SHA-256."""
        bases = {}
        for entry in new:
            if not has.zstd or not 0 < entry.size_bytes <= has.patch_bytes_max:
                continue
            for sha256 in predecessors(entry, has.files):
                kept = self.files.find(sha256)
                if kept and 0 < kept[0].stat().st_size <= has.patch_bytes_max:
                    bases[entry.sha256] = sha256
                    break
        return bases

    def _make(
        self, key: str, bundle: Bundle, new: Sequence[FileEntry], bases: Mapping[str, str], *, zstd: bool
    ) -> None:
        with self._temporary_folder() as folder:
            unpacked = Path(folder) / "files"
            unpacked.mkdir()
            bundle.unpack(unpacked, frozenset(entry.path for entry in new))
            parts = []
            for number, entry in enumerate(new):
                old = bases.get(entry.sha256, "")
                content = self._content(old) if old else None
                base = (old, content) if content is not None else None
                parts.append(smallest_form(entry, unpacked / entry.path, base, zstd, Path(folder) / str(number)))
            with (Path(folder) / "delta").open("wb") as out:
                write_delta(out, bundle.envelope.raw, parts)
            self._keep_files(new, unpacked)
            self._deltas.put(key, [Path(folder) / "delta"])

    def _keep_files(self, entries: Iterable[FileEntry], unpacked: Path) -> None:
        for entry in entries:
            if not self.files.find(entry.sha256):
                self.files.put(entry.sha256, [unpacked / entry.path])

    def _content(self, sha256: str) -> bytes | None:
        """Return the content with this hash. Return None if the file is missing or damaged."""
        with contextlib.suppress(OSError):
            content = b"".join(path.read_bytes() for path in self.files.find(sha256))
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
        return None

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a folder on the disk of the cache. The cache removes the folder if this process is killed."""
        self._deltas.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".new-", dir=self._deltas.folder)


def make_patch(new: bytes, old: bytes) -> bytes:
    """Return the patch that `zstd --patch-from` would make. The old content is the dictionary.

    The tables of the match finder must cover the whole dictionary. Otherwise zstd searches only the dictionary's end.
    """
    dictionary = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    window = min(max((len(old) + len(new)).bit_length(), WINDOW_LOG_MIN), WINDOW_BYTES_MAX.bit_length() - 1)
    tables = min(max(len(old).bit_length(), WINDOW_LOG_MIN), window)
    settings = zstandard.ZstdCompressionParameters.from_level(
        PATCH_LEVEL,
        window_log=window,
        hash_log=tables,
        chain_log=tables,
        enable_ldm=True,
        source_size=len(new),
        dict_size=len(old),
    )
    return zstandard.ZstdCompressor(dict_data=dictionary, compression_params=settings).compress(new)


def _key(bundle: Bundle, new: Sequence[FileEntry], bases: Mapping[str, str], has: DeviceFiles) -> str:
    """Return a hash of everything that determines the bytes of a delta."""
    words = [FORMAT, zstandard.__version__, hashlib.sha256(bundle.envelope.raw).hexdigest(), has.zstd]
    words += [[entry.sha256, bases.get(entry.sha256, "")] for entry in new]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()
