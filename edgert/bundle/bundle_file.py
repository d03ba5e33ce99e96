"""The bundle: one `.edgert` file with a signed manifest and the files it names.

The file is a plain USTAR archive (`tar tvf` lists it): `manifest.dsse.json`, then the files in the order in which the
manifest names them. The reader never parses the archive. The signed manifest alone determines the headers, sizes and
hashes, and the reader compares every byte with them. So no header can name a link, a device, a path outside the folder,
or more bytes than were signed.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import BinaryIO

from edgert.bundle.envelope import ENVELOPE_NAME, Envelope, parse_envelope, sign
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.bundle.signing import PublicKey, SigningKey
from edgert.durable import replacing, storing, sync_file, sync_folders
from edgert.errors import BundleCorrupt, BundleError

ENVELOPE_BYTES_MAX = 4 * 1024**2
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_CHUNK_BYTES = 1024**2


def write_bundle(path: Path, manifest: Manifest, files: Mapping[str, Path], key: SigningKey) -> None:
    """Write a signed bundle beside `path`, then rename it to `path`.

    `files` maps each name in the manifest to the path of the file. The same manifest, files and key give the same
    bytes. Raises BundleCorrupt if a file differs from its entry, StorageFailed on a write error.
    """
    envelope = sign(manifest.to_bytes(), key)
    if len(envelope) > ENVELOPE_BYTES_MAX:
        raise BundleCorrupt(f"the manifest takes {len(envelope)} bytes; at most {ENVELOPE_BYTES_MAX} are allowed")
    with storing(f"cannot write {path}"), replacing(path, shared=True) as out:
        out.write(_header(ENVELOPE_NAME, len(envelope)) + envelope + _padding(len(envelope)))
        for entry in manifest.files:
            out.write(_header(entry.path, entry.size_bytes))
            with files[entry.path].open("rb") as source:
                copy_entry(source, entry, out.write)
            out.write(_padding(entry.size_bytes))
        out.write(_END)


@dataclass(frozen=True)
class Bundle:
    """An open bundle. `signed_by` is None if the signature is unchecked. Error messages start with `path`."""

    manifest: Manifest
    envelope: Envelope
    signed_by: PublicKey | None
    path: Path
    _file: BinaryIO
    _payload_start: int

    @property
    def digest(self) -> str:
        """The manifest's SHA-256. It identifies the whole content: the manifest has the hashes of all files."""
        return self.envelope.digest

    def verify_files(self) -> None:
        """Read every byte after the manifest. Raises BundleCorrupt at the first byte that was not signed."""
        with _naming(self.path):
            self._read_files(frozenset(), lambda entry: None)

    def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return one file's content, checked against its entry.

        Raises BundleCorrupt; also BundleError if the file is missing or larger than `bytes_max`.
        """
        with _naming(self.path):
            at, content = self._payload_start, list[bytes]()
            for entry in self.manifest.files:
                if entry.path == path:
                    break
                at += _BLOCK + entry.size_bytes + len(_padding(entry.size_bytes))
            else:
                raise BundleError(f"the bundle contains no file {path}")
            if entry.size_bytes > bytes_max:
                raise BundleError(f"{path} has {entry.size_bytes} bytes; at most {bytes_max} are read")
            self._file.seek(at)
            _expect(self._file, _header(entry.path, entry.size_bytes), f"the header of {entry.path}")
            copy_entry(self._file, entry, content.append)
            return b"".join(content)

    def unpack(self, folder: Path, wanted: frozenset[str]) -> None:
        """Verify the whole bundle and write the `wanted` files durably into `folder`.

        `folder` exists and is empty. Raises BundleCorrupt or StorageFailed; the caller then removes the written files.
        """
        with unpacking(folder), _naming(self.path):
            self._read_files(wanted, lambda entry: create_file(folder / entry.path))

    def _read_files(self, wanted: frozenset[str], create: Callable[[FileEntry], BinaryIO | None]) -> None:
        self._file.seek(self._payload_start)
        for entry in self.manifest.files:
            _expect(self._file, _header(entry.path, entry.size_bytes), f"the header of {entry.path}")
            target = create(entry) if entry.path in wanted else None
            if target is None:
                copy_entry(self._file, entry, lambda _: None)
            else:
                with target:
                    copy_entry(self._file, entry, target.write)
                    sync_file(target)
            _expect(self._file, _padding(entry.size_bytes), f"the padding of {entry.path}")
        _expect(self._file, _END, "the end of the archive")
        if self._file.read(1):
            raise BundleCorrupt("bytes follow the end of the bundle: copy it again from the host that built it")


@contextmanager
def open_bundle(path: Path, trusted: tuple[PublicKey, ...] | None) -> Iterator[Bundle]:
    """Open a bundle; check its envelope, its signature by one of the `trusted` keys, and its manifest.

    With `trusted` None, the signature stays unchecked: use this to inspect a bundle, never to install a bundle.
    `verify_files` and `unpack` check the files. Raises BundleError and its subclasses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise BundleCorrupt(f"cannot open bundle {path}: {_refusal(path.absolute())}") from error
    except OSError as error:
        raise BundleCorrupt(f"cannot open bundle {path}: {error.strerror}; give the .edgert file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleCorrupt(f"{path} is a pipe or a device, not a file: give the .edgert file")
    with os.fdopen(descriptor, "rb") as file:
        with _naming(path):
            bundle = _open(path, file, trusted)
        yield bundle


def _refusal(path: Path) -> str:
    """Return why this user may not read `path`, and what to do. Commands of root act as another user."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK):
            advice = f"move the bundle to a folder that this user may enter: mv {quote(str(path))} /var/tmp/"
            return f"user {user} may not enter {folder}; {advice}"
    return f"user {user} may not read it; allow it: chmod o+r {quote(str(path))}"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the bundle's path to the message of a BundleError, because several bundles may be open."""
    try:
        yield
    except BundleError as error:
        raise error.with_message(f"{path}: {error.message}") from error


def _open(path: Path, file: BinaryIO, trusted: tuple[PublicKey, ...] | None) -> Bundle:
    head = file.read(_BLOCK)
    if len(head) < _BLOCK or not head.startswith(ENVELOPE_NAME.encode() + b"\0"):
        raise BundleCorrupt("this is not a bundle: give the .edgert file that edgert build wrote")
    try:
        size = int(head[124:135], 8)
    except ValueError:
        size = -1
    if not 0 < size <= ENVELOPE_BYTES_MAX or head != _header(ENVELOPE_NAME, size):
        raise BundleCorrupt("the bundle's first header is damaged: copy the bundle again from the host that built it")
    data = file.read(size)
    if len(data) != size:
        raise BundleCorrupt("the bundle ends inside its manifest: the copy is incomplete, send it again")
    _expect(file, _padding(size), "the padding of the manifest")
    envelope = parse_envelope(data)
    signed_by = None if trusted is None else envelope.verify(trusted)
    return Bundle(Manifest.from_bytes(envelope.payload), envelope, signed_by, path, file, file.tell())


@lru_cache(64)  # a bundle is read several times, and the header is a third of the work for a small file
def _header(name: str, size: int) -> bytes:
    """Return the only USTAR header that is allowed for a regular file of this name and size."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _expect(file: BinaryIO, want: bytes, what: str) -> None:
    if file.read(len(want)) != want:
        raise BundleCorrupt(
            f"{what} is damaged or missing, so the bundle was changed or its copy is incomplete: copy it again"
        )


def copy_entry(source: BinaryIO, entry: FileEntry, write: Callable[[bytes], object]) -> None:
    """Pass exactly the entry's bytes to `write`. Raises BundleCorrupt unless they have the signed hash."""
    bytes_left, digest = entry.size_bytes, hashlib.sha256()
    while bytes_left:
        chunk = source.read(min(bytes_left, _CHUNK_BYTES))
        if not chunk:
            raise BundleCorrupt(f"{entry.path} ends {bytes_left} bytes early: the copy is incomplete, send it again")
        digest.update(chunk)
        write(chunk)
        bytes_left -= len(chunk)
    if digest.hexdigest() != entry.sha256:
        raise BundleCorrupt(
            f"{entry.path} does not match its signed SHA-256, so the bundle was changed or damaged: copy it again"
        )


@contextmanager
def unpacking(folder: Path) -> Iterator[None]:
    """Make the new names in `folder` durable on the disk when the block ends. Raises StorageFailed."""
    with storing(f"cannot unpack into {folder}"):
        yield
        sync_folders(folder)


def create_file(path: Path) -> BinaryIO:
    """Create a file for writing, and its missing parent folders. Follow no link and replace no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o644), "wb")
