"""The delta: the part of a bundle that a device lacks, in one file for `edgertd install`.

    b"EDGERTP1", header length (u32, little-endian), header, then the parts one after the other:
    the bundle's signed envelope, and each sent file, identified by its SHA-256.

The header is JSON: {"envelope": bytes, "parts": [{"sha256", "encoding", "bytes", "base"}]}. `encoding` is "raw", "zstd"
or "patch". A patch is a zstd frame whose dictionary is the raw content of another file, which a version on the device
contains. `base` is the SHA-256 of this file.

Only the envelope is signed, so the reader trusts nothing else. The signed manifest determines the files, their sizes
and hashes; a part must give exactly the bytes of its file. If a file has no part, the reader searches the versions in
the slots for a file with this hash, and checks the hash again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from edgert.bundle.bundle_file import ENVELOPE_BYTES_MAX, Bundle, copy_entry, create_file, open_bundle, unpacking
from edgert.bundle.envelope import Envelope, parse_envelope
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.bundle.signing import PublicKey
from edgert.durable import os_error_as, sync_file
from edgert.errors import BundleCorrupt

MAGIC = b"EDGERTP1"
HEADER_BYTES_MAX = 4 * 1024**2
ENCODINGS = ("raw", "zstd", "patch")
WINDOW_BYTES_MAX = 2**27  # the window of a zstd frame; a reader uses no more memory than the signed size
PATCH_BYTES_MAX = WINDOW_BYTES_MAX // 2  # for a patch's base and for its result, because the window spans both files
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1024**2
_SHA256_DIGITS = 64

Held = Callable[[Manifest], Mapping[str, Path]]  # SHA-256 -> the path of a file with that content


@dataclass(frozen=True)
class Part:
    """One file in a delta: the SHA-256 of its content, its packed form, and its packed size."""

    sha256: str
    encoding: str
    size_bytes: int
    base: str = ""


def has_zstd() -> bool:
    """Return whether this machine can read the encodings "zstd" and "patch"."""
    return importlib.util.find_spec("zstandard") is not None


def write_delta(out: BinaryIO, envelope: bytes, parts: Sequence[tuple[Part, Path]]) -> None:
    """Write a delta of `parts`, each with its packed file. The same parts always give the same bytes."""
    listed = [{"sha256": p.sha256, "encoding": p.encoding, "bytes": p.size_bytes, "base": p.base} for p, _ in parts]
    header = json.dumps({"envelope": len(envelope), "parts": listed}, sort_keys=True).encode()
    out.write(MAGIC + _LENGTH.pack(len(header)) + header + envelope)
    for part, content in parts:
        assert content.stat().st_size == part.size_bytes
        with content.open("rb") as source:
            shutil.copyfileobj(source, out, _CHUNK_BYTES)


def parts_of(path: Path) -> list[Part]:
    """Return the parts in a delta's header, unverified. Raises BundleCorrupt and OSError."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        return _header(file)[1]


@dataclass(frozen=True)
class Delta:
    """An open delta with a verified envelope. `_held` returns the files that are already on the device."""

    manifest: Manifest
    envelope: Envelope
    _file: BinaryIO
    _parts: Mapping[str, tuple[int, Part]]
    _held: Held

    @property
    def digest(self) -> str:
        """The bundle's digest: the manifest's SHA-256."""
        return self.envelope.digest

    def verify_files(self) -> None:
        """Read every part. Raises BundleCorrupt at the first part that does not give the signed content."""
        held = self._held(self.manifest)
        for entry in self.manifest.files:
            if entry.sha256 in self._parts:
                self._copy(entry, held, lambda _: None)

    def unpack(self, folder: Path, wanted: frozenset[str]) -> None:
        """Write the `wanted` files durably into `folder`, each checked against its signed size and hash.

        `folder` exists and is empty. Raises BundleCorrupt or StorageFailed; the caller then removes the written files.
        """
        held = self._held(self.manifest)
        with unpacking(folder):
            for entry in self.manifest.files:
                if entry.path in wanted:
                    with create_file(folder / entry.path) as target:
                        self._copy(entry, held, target.write)
                        sync_file(target)

    def _copy(self, entry: FileEntry, held: Mapping[str, Path], write: Callable[[bytes], object]) -> None:
        at, part = self._parts.get(entry.sha256, (0, None))
        if part is None:
            with _open_held(held, entry.sha256, entry.path) as source:
                copy_entry(source, entry, write)
            return
        self._file.seek(at)
        packed = cast(BinaryIO, _Range(self._file, part.size_bytes))
        if part.encoding == "raw":
            copy_entry(packed, entry, write)
        else:
            base = b""
            if part.encoding == "patch":
                with _open_held(held, part.base, f"the base of {entry.path}") as file:
                    if os.fstat(file.fileno()).st_size > PATCH_BYTES_MAX:
                        raise BundleCorrupt(
                            f"{entry.path} is a patch of a file larger than {PATCH_BYTES_MAX} bytes: send the whole bundle"
                        )
                    base = file.read()
            _copy_zstd(packed, base, entry, write)
        if packed.read(1):
            raise BundleCorrupt(f"the part of {entry.path} contains more bytes than were signed: send it again")


@contextmanager
def open_delivery(path: Path, trusted: tuple[PublicKey, ...], held: Held) -> Iterator[Bundle | Delta]:
    """Open a bundle or a delta and verify its envelope. Raises BundleError and its subclasses."""
    if not _is_delta(path):
        with open_bundle(path, trusted) as bundle:
            yield bundle
        return
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        yield _open(file, trusted, held)


def _is_delta(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # `open_bundle` then raises the error


def _open(file: BinaryIO, trusted: tuple[PublicKey, ...], held: Held) -> Delta:
    """Read the file after the magic. Check each size before use; the parts must fill the file exactly."""
    envelope_bytes, parts = _header(file)
    raw = file.read(envelope_bytes)
    envelope = parse_envelope(raw)
    envelope.verify(trusted)
    manifest = Manifest.from_bytes(envelope.payload)
    at, placed = file.tell(), dict[str, tuple[int, Part]]()
    for part in parts:
        placed[part.sha256] = (at, part)
        at += part.size_bytes
    if os.fstat(file.fileno()).st_size != at or len(placed) != len(parts):
        raise BundleCorrupt("the delta's size differs from its parts: the copy is incomplete, send it again")
    if not set(placed) <= {entry.sha256 for entry in manifest.files}:
        raise BundleCorrupt("the delta contains a part that the bundle does not name: send it again")
    return Delta(manifest, envelope, file, placed, held)


def _header(file: BinaryIO) -> tuple[int, list[Part]]:
    """Read the header, which is next in `file`. Return the envelope's size and the parts."""
    try:
        (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if size > HEADER_BYTES_MAX:
            raise ValueError(f"it has {size} bytes; at most {HEADER_BYTES_MAX} are allowed")
        header = json.loads(file.read(size))
        envelope_bytes = header["envelope"]
        if type(envelope_bytes) is not int or not 0 < envelope_bytes <= ENVELOPE_BYTES_MAX:
            raise ValueError(f"the size of the envelope is {str(envelope_bytes)[:40]}")
        return envelope_bytes, [_read_part(value) for value in header["parts"]]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleCorrupt(f"the delta's header cannot be read ({error}): send it again") from error


def _read_part(value: Mapping[str, object]) -> Part:
    sha256, encoding, size, base = value["sha256"], value["encoding"], value["bytes"], value["base"]
    if not (
        isinstance(sha256, str) and isinstance(base, str) and type(size) is int and size >= 0 and encoding in ENCODINGS
    ):
        raise ValueError("a part has a value of the wrong type")
    if len(sha256) != _SHA256_DIGITS or len(base) not in (0, _SHA256_DIGITS):
        raise ValueError("a digest of a part is not 64 hex digits")
    return Part(sha256, str(encoding), size, base)


def _open_held(held: Mapping[str, Path], sha256: str, what: str) -> BinaryIO:
    path = held.get(sha256)
    if path is None:
        raise BundleCorrupt(f"the delta needs {what}, which no slot of this device contains: send the whole bundle")
    with os_error_as(
        BundleCorrupt, f"the delta needs {what}, which cannot be read on this device", "send the whole bundle"
    ):
        return path.open("rb")


def _copy_zstd(packed: BinaryIO, base: bytes, entry: FileEntry, write: Callable[[bytes], object]) -> None:
    try:
        import zstandard
    except ImportError as error:
        raise BundleCorrupt(
            "the delta is compressed, and this device has no package zstandard to unpack it: run edgert bootstrap DEVICE "
            "--upgrade on the host, or send the whole bundle"
        ) from error
    dictionary = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if base else None
    unpacker = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=WINDOW_BYTES_MAX)
    try:
        with unpacker.stream_reader(packed, read_size=_CHUNK_BYTES, closefd=False) as reader:
            copy_entry(cast(BinaryIO, reader), entry, write)
            if reader.read(1):
                raise BundleCorrupt(f"the part of {entry.path} contains more bytes than were signed: send it again")
    except (zstandard.ZstdError, MemoryError) as error:
        raise BundleCorrupt(f"the part of {entry.path} cannot be unpacked ({error}): send it again") from error


class _Range:
    """The next `left` bytes of a file."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self._left = left

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data
