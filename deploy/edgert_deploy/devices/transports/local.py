"""This machine as a device: processes and files; the inventory's address is the state folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

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
    in_folder,
    sha256_command,
)

_CHUNK_BYTES = 1024**2
_ERROR_BYTES_MAX = 2000
_RECEIVE = 'umask 077; : >"$1" && chmod "$2" "$1" && exec dd of="$1" bs=65536 conv=notrunc,fsync status=none'


class LocalTransport:
    """Runs commands as the calling user, each in its own session: a time-out ends all its processes.

    Root copies files as the owner of the folder, and follows no link there that another user could have made.
    """

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
        try:
            _send(local, PurePosixPath(remote), how)
        except OSError as error:
            raise StorageFailed(f"cannot copy {local} to {remote}: {error.strerror or error}") from error

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


class _Process:
    """A command in a folder, as `in_folder` runs it, whose input is a file of this host."""

    def __init__(self, folder: str, argv: Sequence[str], *, make: bool = False) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        self._process = subprocess.Popen(
            in_folder(folder, argv, make=make),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            umask=0o022,
        )

    def write(self, data: bytes) -> bool:
        """Write to its input; return False if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            return True
        return False

    def end(self, doing: str) -> str:
        """Close its input and return its output. Raises StorageFailed if it failed."""
        with self._errors:
            out, _ = self._process.communicate()
            self._errors.seek(0)
            said = self._errors.read(_ERROR_BYTES_MAX).decode(errors="replace").strip()
        if self._process.returncode:
            raise StorageFailed(f"cannot {doing}: {said or f'exit code {self._process.returncode}'}")
        return out.decode(errors="replace").strip()


def _send(source: Path, target: PurePosixPath, how: PutOptions) -> None:
    """Copy beside the target, compare the hash of the copy with that of the source, rename."""
    folder, doing = str(target.parent), f"copy {source} to {target}"
    partial = f"./.{target.name}.{uuid.uuid4().hex}.part"
    digest, done, size, pace = hashlib.sha256(), 0, source.stat().st_size, Pace(how.bytes_per_s)
    try:
        receiver = _Process(folder, ["sh", "-c", _RECEIVE, "sh", partial, f"{how.mode:o}"], make=True)
        with source.open("rb") as file:
            while (chunk := file.read(_CHUNK_BYTES)) and receiver.write(chunk):
                digest.update(chunk)
                done += len(chunk)
                pace.passed(len(chunk))
                if how.progress is not None:
                    how.progress(done, size)
        receiver.end(doing)
        if _Process(folder, sha256_command(partial)).end(doing) != digest.hexdigest():
            raise StorageFailed(f"{target} reads back different bytes: the disk may be failing")
        _Process(folder, ["mv", "-fT", partial, f"./{target.name}"]).end(doing)
    except BaseException:
        with contextlib.suppress(StorageFailed):
            _Process(folder, ["rm", "-f", partial]).end("remove what arrived")
        raise
