"""The object cache keeps the files that this host has sent, by SHA-256.

The host later makes patches from these files. If the cache fails, the deployment continues and sends more bytes. A full
cache removes the least recently used files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import FileEntry

BYTES_MAX = 2 * 1024**3


@dataclass(frozen=True)
class ObjectCache:
    """Files in `folder`, each named by a hash.

    After each `keep`, all files together have at most `bytes_max` bytes, unless the new file alone is larger.
    """

    folder: Path
    bytes_max: int = BYTES_MAX

    def find(self, name: str) -> Path | None:
        """Return the path of an object and mark it as just used; return None if the cache lacks it."""
        path = self.folder / name
        with contextlib.suppress(OSError):
            os.utime(path)
            return path
        return None

    def keep(self, name: str, content: Path) -> Path:
        """Move the file `content`, which is in a `temporary_folder`, into the cache as `name`. Raises OSError."""
        path = self.folder / name
        content.replace(path)
        self._evict(path)
        return path

    def keep_files(self, entries: Iterable[FileEntry], unpacked: Path) -> None:
        """Copy into the cache those files of an unpacked bundle that the cache lacks."""
        for entry in entries:
            if self.find(entry.sha256) is None and entry.size_bytes < self.bytes_max:
                with contextlib.suppress(OSError), self.temporary_folder() as folder:
                    shutil.copyfile(unpacked / entry.path, Path(folder) / "copy")
                    self.keep(entry.sha256, Path(folder) / "copy")

    def keep_bundle(self, path: Path) -> None:
        """Copy into the cache those files of a bundle that the cache lacks. Raises BundleError."""
        with self.temporary_folder() as folder, open_bundle(path, trusted=None) as bundle:
            bundle.unpack(Path(folder), frozenset(entry.path for entry in bundle.manifest.files))
            self.keep_files(bundle.manifest.files, Path(folder))

    def read(self, sha256: str) -> bytes | None:
        """Return the content with this hash. Return None if the file is missing or damaged."""
        path = self.find(sha256)
        with contextlib.suppress(OSError):
            content = path.read_bytes() if path is not None else b""
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
        return None

    def temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a temporary folder beside the objects, from which `keep` moves files. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".", dir=self.folder)

    def _evict(self, but: Path) -> None:
        objects = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if path.is_file():
                    objects.append((path.stat().st_mtime, path.stat().st_size, path))
        bytes_left = sum(size for _, size, _ in objects)
        for _, size, path in sorted(objects):
            if bytes_left > self.bytes_max and path != but:
                path.unlink(missing_ok=True)
                bytes_left -= size
