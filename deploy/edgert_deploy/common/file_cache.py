"""A cache of files on disk. An entry has the files that a key, the SHA-256 of all inputs, determines.

An entry is a folder with the files and `entry.json`, which has the SHA-256 of each file. `put` writes an entry to a
temporary folder and then renames the folder. `get` verifies an entry at each read. The least recently used entry is
evicted first. A damaged entry, a full disk or a read-only folder is a cache miss, so the files are made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.toml_file import about
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.common.quantities import size_bytes

BYTES_MAX = 4 * 10**9
ENTRY = "entry.json"
ENTRY_BYTES_MAX = 1024**2
# A write that is unfinished after this time was interrupted.
ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class FileCache:
    """Entries in `folder`: at most `bytes_max` in total after each `put`."""

    folder: Path
    bytes_max: int = BYTES_MAX

    def get(self, key: str, out_dir: Path) -> bool:
        """Copy the files of `key` into the empty `out_dir`. Return False if the entry is absent or damaged."""
        entry = self.folder / key
        try:
            if (entry / ENTRY).stat().st_size > ENTRY_BYTES_MAX:
                raise ValueError(f"{ENTRY} is larger than {ENTRY_BYTES_MAX} bytes")
            for name, digest in json.loads((entry / ENTRY).read_bytes()).items():
                if Path(name).name != name or _copy(entry / name, out_dir / name) != digest:
                    raise ValueError(f"{name} is not the file that was stored")
            os.utime(entry / ENTRY)
            return True
        except (OSError, ValueError, TypeError, AttributeError):
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry would fail again
            for path in out_dir.iterdir():
                path.unlink()
            return False

    def find(self, key: str) -> list[Path]:
        """Return the files of `key` in the cache; [] if the entry is absent. Only `get` verifies them."""
        entry = self.folder / key
        with contextlib.suppress(OSError):
            os.utime(entry / ENTRY)
            return [path for path in entry.iterdir() if path.name != ENTRY]
        return []

    def put(self, key: str, paths: Sequence[Path]) -> None:
        """Store copies of files under `key`. Errors of the disk are ignored."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
            try:
                digests = {path.name: _copy(path, beside / path.name) for path in paths}
                (beside / ENTRY).write_text(json.dumps(digests, sort_keys=True))
                beside.rename(self.folder / key)
            finally:
                # The folder still exists only if the writing failed, or if another process stored this key first.
                shutil.rmtree(beside, ignore_errors=True)
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used entries until the rest fits, and remove interrupted writes."""
        entries = sorted(self._entries(), key=lambda entry: entry[1], reverse=True)
        total = 0
        for path, _, size in entries:
            total += size
            if total > self.bytes_max:
                shutil.rmtree(path, ignore_errors=True)
        remove_abandoned(self.folder.glob(".new-*"))

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        """Yield each entry, the time of its last use, and its bytes."""
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if re.fullmatch(r"[0-9a-f]{64}", path.name):
                    size = sum(file.stat().st_size for file in path.iterdir())
                    yield path, (path / ENTRY).stat().st_mtime, size


def default_cache() -> FileCache:
    """Return the cache in $XDG_CACHE_HOME, else in ~/.cache. Raises ConfigInvalid.

    $EDGERT_CACHE is the largest size of the cache.
    """
    limit = os.environ.get("EDGERT_CACHE", "")
    with about("EDGERT_CACHE"):
        bytes_max = size_bytes(limit) if limit else BYTES_MAX
    return FileCache(cache_folder() / "build", bytes_max)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove folders of interrupted writes: those that did not change for ABANDONED_AFTER_S."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(1024**2):
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()
