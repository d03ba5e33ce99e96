"""One repository of an OCI registry: manifests and blobs, every byte checked against its digest.

The protocol: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md. A registry only stores bytes and
is not trusted: digests identify the content, and signatures identify the author (edgert.bundle).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import urllib3

from edgert.durable import PRIVATE, storing, sync_file
from edgert.errors import NotInRegistry, RegistryCorrupt, RegistryError, RegistryLoginRefused, RegistryUnreachable
from edgert.registry.address import DIGEST, TAG, Repository, digest_of
from edgert.registry.connection import Body, Connection, checked_location, translated
from edgert.registry.login import Credentials, Login

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_BYTES_MAX = 1024**2
SLOWEST_BYTES_PER_S = 1000.0
START_S = 60.0  # the time allowed in addition to the transfer at the slowest rate
RETRY_AFTER_S_MAX = 24 * 3600.0
ERROR_BYTES_MAX = 8192  # the most bytes that are read of a registry's error
ERROR_CHARS_MAX = 200  # the longest reason of a registry that a message contains
ERROR_S_MAX = 5.0  # the longest wait for a registry's error
_CHUNK_BYTES = 64 * 1024
_OVERLOADED = (408, 425, 429, 500, 502, 503, 504)

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class Blob:
    """The digest (sha256:...) and the size of a blob."""

    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Fetched:
    digest: str
    data: bytes


class Registry:
    """A repository with its login. One thread at a time may use it; `clock` counts seconds.

    The methods raise RegistryUnreachable if a repetition may help, RegistryLoginRefused, NotInRegistry,
    RegistryCorrupt for wrong bytes, and RegistryError for other answers.
    """

    def __init__(
        self,
        repository: Repository,
        credentials: Credentials | None = None,
        ca: Path | None = None,
        *,
        connection: Connection | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository = repository
        self._connection = connection or Connection(ca)
        self._login = Login(self._connection, repository.host, credentials)
        self._clock = clock

    def close(self) -> None:
        self._connection.close()

    @property
    def date_s(self) -> float | None:
        """The registry's time in its last answer, in seconds since 1970; None if the answer has no time."""
        return self._connection.date_s

    def manifest(self, reference: str, known: str = "") -> Fetched | None:
        """Return the manifest of a tag or a digest; None if the manifest's digest is `known`."""
        if not (TAG.fullmatch(reference) or DIGEST.fullmatch(reference)):
            raise RegistryError(f"{reference[:80]!r} is neither a tag nor a digest")
        headers = {"Accept": MANIFEST_TYPE} | ({"If-None-Match": f'"{known}"'} if known else {})
        what = f"manifest {reference}"
        with self._request("GET", f"/manifests/{reference}", headers) as response:
            if response.status == 304 and known:
                return None
            self._expect(response, what, 200)
            data = self._read_all(response, what, MANIFEST_BYTES_MAX)
        digest = digest_of(data)
        if DIGEST.fullmatch(reference) and digest != reference:
            raise RegistryCorrupt(
                f"{self.repository} sent wrong bytes for {what} (digest {digest}): try again, or publish again"
            )
        return None if digest == known else Fetched(digest, data)

    def has(self, blob: Blob) -> bool:
        """Return whether the registry has the blob, by a fetch of its last byte.

        A HEAD request would only query the registry's index, which may list a file that the storage lost or truncated.
        """
        last = blob.size_bytes - 1
        headers = {"Range": f"bytes={last}-{last}"} if blob.size_bytes else {}
        with self._request("GET", f"/blobs/{_checked(blob)}", headers) as response:
            if response.status in (404, 416):
                return False
            self._expect(response, f"blob {blob.digest}", 200, 206)
            if response.status == 200:  # a registry may ignore the range
                return response.headers.get("Content-Length") == str(blob.size_bytes)
            if response.headers.get("Content-Range") != f"bytes {last}-{last}/{blob.size_bytes}":
                return False
            with suppress(RegistryUnreachable):  # the index has the right size, but the file is shorter
                return len(self._read_all(response, f"blob {blob.digest}", 1)) == 1
            return False

    def read(self, blob: Blob, bytes_max: int) -> bytes:
        """Return the content of a small blob, checked."""
        what = f"blob {blob.digest}"
        if blob.size_bytes > bytes_max:
            raise RegistryCorrupt(
                f"{what} in {self.repository} has {blob.size_bytes} bytes; at most {bytes_max} are read"
            )
        with self._request("GET", f"/blobs/{_checked(blob)}") as response:
            self._expect(response, what, 200)
            data = self._read_all(response, what, blob.size_bytes)
        if digest_of(data) != blob.digest:
            raise RegistryCorrupt(
                f"{self.repository} sent wrong bytes for {what} (digest {digest_of(data)}): try again, or publish again"
            )
        return data

    def download(self, blob: Blob, path: Path, on_bytes: OnBytes = lambda count: None) -> None:
        """Fetch the blob to `path`, which is missing or contains the bytes of an earlier attempt.

        The fetched bytes stay for the next attempt, even after a power cut. If the bytes have the blob's digest, the
        file is durable. Otherwise the method removes the file and raises RegistryCorrupt. Raises StorageFailed.
        `on_bytes` is called with the size of each piece on disk. It may wait to limit the rate, or raise an error to
        stop the download.
        """
        _checked(blob)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with storing(f"cannot write {path}"):
            with os.fdopen(os.open(path, flags, PRIVATE), "r+b") as file:
                digest = _hashed(file, blob.size_bytes)
                try:
                    self._continue(blob, file, digest, on_bytes)
                finally:
                    sync_file(file)
            if f"sha256:{digest.hexdigest()}" != blob.digest:
                path.unlink()
                raise RegistryCorrupt(
                    f"{self.repository} sent wrong bytes for blob {blob.digest}: they were removed, and the next "
                    "attempt starts again"
                )

    def upload(self, blob: Blob, source: Path | bytes, on_bytes: OnBytes = lambda count: None) -> None:
        """Upload a blob that the registry lacks. Raises RegistryCorrupt if it still lacks the blob afterwards.

        `on_bytes` is called with the size of each sent piece, and with a negative size for bytes that must be sent
        again.
        """
        what = f"blob {blob.digest}"
        with self._request("POST", "/blobs/uploads/", {"Content-Length": "0"}) as response:
            if response.status == 404:
                raise NotInRegistry(
                    f"{self.repository} accepts no upload{self._reason_of(response)}: check its name. In some registries "
                    "you must first create the repository or a project"
                )
            self._expect(response, what, 202)
            location = response.headers.get("Location")
        if location is None:
            raise RegistryError(
                f"{self.repository} gives no upload address for {what}: check that the address is a registry's"
            )
        url = checked_location(self.repository.url, location)
        url += f"{'&' if urlsplit(url).query else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size_bytes)}
        wait_s, content = START_S + blob.size_bytes / SLOWEST_BYTES_PER_S, _Content(source, on_bytes)
        try:
            with self._request("PUT", url, headers, content, wait_s) as response:
                self._expect(response, what, 201)
            if not self.has(blob):  # some registries keep an existing damaged blob of this digest
                raise RegistryCorrupt(
                    f"{self.repository} accepted {what}, but does not return it: its storage is damaged. Remove that "
                    "blob from its storage, or restore it, then repeat the command"
                )
        except RegistryError:
            content.take_back()
            raise

    def put_manifest(self, reference: str, data: bytes) -> str:
        """Upload a manifest under a tag or its digest, after all its blobs; return the manifest's digest."""
        headers = {"Content-Type": MANIFEST_TYPE}
        with self._request("PUT", f"/manifests/{reference}", headers, data) as response:
            self._expect(response, f"manifest {reference}", 201)
        return digest_of(data)

    def _continue(self, blob: Blob, file: BinaryIO, digest: hashlib._Hash, on_bytes: OnBytes) -> None:
        """Fetch the bytes that follow the content of `file`. `digest` is the hash of this content."""
        at = file.tell()
        if at == blob.size_bytes:
            return
        what = f"blob {blob.digest}"
        headers = {"Range": f"bytes={at}-{blob.size_bytes - 1}"} if at else {}
        with self._request("GET", f"/blobs/{blob.digest}", headers) as response:
            self._expect(response, what, 200, 206)
            if response.status == 200:  # a registry may ignore the range
                skip, length = at, blob.size_bytes
            else:
                skip, length = 0, blob.size_bytes - at
                if response.headers.get("Content-Range") != f"bytes {at}-{blob.size_bytes - 1}/{blob.size_bytes}":
                    raise RegistryCorrupt(f"{self.repository} sent another part of {what} than the requested part")
            # Refuse chunks, because a server could send the length of a chunk byte by byte.
            if response.headers.get("Content-Length") != str(length) or "Transfer-Encoding" in response.headers:
                raise RegistryCorrupt(
                    f"{self.repository} announces {response.headers.get('Content-Length')} bytes of {what}; "
                    f"{length} are right"
                )
            for piece in self._pieces(response, what, length):
                new, skip = piece[skip:], max(skip - len(piece), 0)
                file.write(new)
                digest.update(new)
                if new:
                    on_bytes(len(new))

    def _pieces(self, response: urllib3.BaseHTTPResponse, what: str, length: int) -> Iterator[bytes]:
        """Yield a body of `length` bytes. Raises RegistryUnreachable if it ends early or arrives too slowly."""
        waited_s, received = 0.0, 0
        while received < length:
            began_s = self._clock()
            with translated(self.repository.url):
                piece = response.read1(min(length - received, _CHUNK_BYTES))
            waited_s += self._clock() - began_s
            received += len(piece)
            if not piece:
                raise RegistryUnreachable(f"{what} of {self.repository} ended {length - received} bytes early")
            yield piece
            if waited_s > START_S + received / SLOWEST_BYTES_PER_S:
                raise RegistryUnreachable(
                    f"{self.repository} sends {what} with less than {SLOWEST_BYTES_PER_S:g} bytes a second: check "
                    "the link to it, then try again"
                )

    def _read_all(self, response: urllib3.BaseHTTPResponse, what: str, bytes_max: int) -> bytes:
        """Return the whole body of a small answer."""
        data = b""
        with self._connection.limited(self.repository.url, self._connection.answer_s):
            # A broken connection first returns the received bytes, and raises its error at the next read.
            while len(data) <= bytes_max and (piece := response.read(bytes_max + 1 - len(data))):
                data += piece
        if len(data) > bytes_max:
            raise RegistryCorrupt(
                f"{what} in {self.repository} is longer than {bytes_max} bytes: the rest was not read"
            )
        return data

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        wait_s: float = 0,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send a request; if the registry requires a login, send it again. `path` may be a whole URL."""
        url = f"{self.repository.url}{path}" if path.startswith("/") else path
        is_registry = urlsplit(url).netloc == self.repository.host
        for first in (True, False):
            login = {"Authorization": self._login.header} if self._login.header and is_registry else {}
            with self._connection.request(method, url, {**(headers or {}), **login}, body, wait_s) as response:
                challenge = response.headers.get("WWW-Authenticate")
                if response.status != 401 or challenge is None or not first or not is_registry:
                    yield response
                    return
            self._login.answer(url, challenge)

    def _expect(self, response: urllib3.BaseHTTPResponse, what: str, *wanted: int) -> None:
        """Raise the error for an answer, unless its status is one of `wanted`."""
        status = response.status
        if status in wanted:
            return
        reason = self._reason_of(response)
        if status in (401, 403):
            raise RegistryLoginRefused(f"{self._login.refused()}{reason}")
        if status == 404:
            raise NotInRegistry(f"{self.repository} has no {what}")
        if status == 405:
            raise NotInRegistry(f"{self.repository} does not accept {what}{reason}")
        if status == 413:
            raise RegistryError(
                f"{self.repository} refuses {what} as too large: raise the limit there, or of a proxy in front of it "
                "(nginx: client_max_body_size 0)"
            )
        if status in _OVERLOADED:
            wait = response.headers.get("Retry-After", "")
            raise RegistryUnreachable(
                f"{self.repository} answers {status} for {what}{reason}: it is overloaded or broken; try again later",
                retry_after_s=min(float(wait), RETRY_AFTER_S_MAX) if wait.isdecimal() else None,
            )
        advice = reason or ": check that the address is a registry's"
        raise RegistryError(f"{self.repository} answers {status} for {what}{advice}")

    def _reason_of(self, response: urllib3.BaseHTTPResponse) -> str:
        """Return the registry's own reason as the end of a sentence; "" if the answer has no reason.

        The format: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes
        """
        data = b""
        with suppress(RegistryError), self._connection.limited(self.repository.url, ERROR_S_MAX):
            data = response.read(ERROR_BYTES_MAX)
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            first = json.loads(data)["errors"][0]
            text = " ".join(f"{first['code']} {first.get('message', '')}".split())
            return f" ({text[:ERROR_CHARS_MAX]})"
        return ""


class _Content:
    """The bytes to send; each iteration starts at the first byte. Reports each piece."""

    def __init__(self, source: Path | bytes, on_bytes: OnBytes) -> None:
        self._source = source
        self._on_bytes = on_bytes
        self._sent_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        self.take_back()
        with BytesIO(self._source) if isinstance(self._source, bytes) else self._source.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                self._sent_bytes += len(chunk)
                self._on_bytes(len(chunk))

    def take_back(self) -> None:
        """Report the sent bytes as not sent, because their request failed."""
        if self._sent_bytes:
            self._on_bytes(-self._sent_bytes)
        self._sent_bytes = 0


def _checked(blob: Blob) -> str:
    if not DIGEST.fullmatch(blob.digest):
        raise RegistryError(f"{blob.digest[:80]!r} is not a SHA-256 digest")
    if blob.size_bytes < 0:
        raise RegistryError(f"blob {blob.digest} has a size below 0")
    return blob.digest


def _hashed(file: BinaryIO, size_bytes: int) -> hashlib._Hash:
    """Hash the content of `file` and stay at its end. First empty a file that is too long."""
    digest = hashlib.sha256()
    if os.fstat(file.fileno()).st_size > size_bytes:
        file.truncate(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest
