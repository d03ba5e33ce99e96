"""This machine as a device: processes and files, no network. The address in the inventory is the state folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from edgert.durable import sync_file
from edgert.errors import DeviceError, StorageFailed
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import (
    EOF_GRACE_S,
    OUTPUT_BYTES_MAX,
    PLAIN,
    LineBuffer,
    LineSink,
    Pace,
    PutOptions,
    Result,
)

_CHUNK_BYTES = 1024**2


class LocalTransport:
    """Runs commands as the calling user, each in a session of its own, so that a time-out ends all its processes."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                umask=0o022,
            )
        except FileNotFoundError as error:
            return Result(tuple(argv), 127, "", f"{argv[0]}: not found ({error.strerror})")
        except OSError as error:
            return Result(tuple(argv), 126, "", f"{argv[0]}: {error.strerror}")
        return _finish(process, tuple(argv), timeout_s, input, on_stderr)

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        _copy(local, Path(remote), how)

    def get(self, remote: str, local: Path) -> None:
        _copy(Path(remote), local, PLAIN)

    def close(self) -> None:
        return None


def _finish(
    process: subprocess.Popen[bytes], argv: tuple[str, ...], timeout_s: float, data: bytes, on_stderr: LineSink | None
) -> Result:
    out, err = LineBuffer(), LineBuffer(on_stderr)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=_drain, args=(stream, buffer), daemon=True)
        for stream, buffer in ((process.stdout, out), (process.stderr, err))
    ]
    for reader in readers:
        reader.start()
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(data)
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise DeviceError(f"`{argv[0]}` took longer than {timeout_s:.0f} s and was killed") from error
    until = time.monotonic() + EOF_GRACE_S
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    if out.full or err.full:
        raise DeviceError(f"`{argv[0]}` printed more than {OUTPUT_BYTES_MAX // 1024**2} MB; it exited with {exit_code}")
    return Result(argv, exit_code, out.text(), err.text())


def _drain(stream: IO[bytes], buffer: LineBuffer) -> None:
    with stream:
        while data := stream.read1(65536):  # type: ignore[attr-defined]  # a pipe of Popen is a BufferedReader
            if not buffer.full:
                buffer.feed(data)


def _copy(source: Path, target: Path, how: PutOptions) -> None:
    """Copy beside the target, compare the hash of the copy with that of the source, rename."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sent = _stream(source, partial, how)
        if _sha256(partial) != sent:
            raise StorageFailed(f"{target} reads back different bytes: the disk may be failing")
        partial.replace(target)
    except OSError as error:
        raise StorageFailed(f"cannot copy {source} to {target}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _stream(source: Path, partial: Path, how: PutOptions) -> str:
    digest, done, size, pace = hashlib.sha256(), 0, source.stat().st_size, Pace(how.bytes_per_s)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, how.mode)
    with source.open("rb") as file, os.fdopen(descriptor, "wb") as out:
        os.fchmod(descriptor, how.mode)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            pace.passed(len(chunk))
            if how.progress is not None:
                how.progress(done, size)
        sync_file(out)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
