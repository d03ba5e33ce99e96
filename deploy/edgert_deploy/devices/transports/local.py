"""This machine as a device. Its address in the inventory is the state folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from edgert.durable import sha256_of
from edgert.errors import DeviceError, StorageFailed
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import (
    EOF_GRACE_S,
    OTHER_BYTES,
    OUTPUT_BYTES_MAX,
    PLAIN,
    LineBuffer,
    LineSink,
    PutOptions,
    Result,
    full_disk,
    in_folder,
    rename_command,
)

_ERROR_CHARS_MAX = 2000
_RECEIVE = (
    'umask 077; export LC_ALL=C; : >"$1" && chmod "$2" "$1" && exec dd of="$1" bs=65536 conv=notrunc,fsync status=none'
)


class LocalTransport:
    """Runs commands as the calling user.

    Each command has its own session, so a time-out ends all processes of the command. Root copies files as the owner of
    the folder, and follows no link in it that another user could have made.
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
        """Write a copy beside the target, compare its hash, then rename it.

        The limit of the speed does not apply on this machine.
        """
        target, doing = PurePosixPath(remote), f"copy {local} to {remote}"
        folder, partial = str(target.parent), f"./.{target.name}.{uuid.uuid4().hex}.part"
        try:
            with local.open("rb") as source:
                _in_folder(folder, ["sh", "-c", _RECEIVE, "sh", partial, f"{how.mode:o}"], doing, source)
            named = _in_folder(folder, rename_command(partial, f"./{target.name}", sha256_of(local)), doing)
            if named == OTHER_BYTES:
                raise StorageFailed(f"{target} reads back different bytes: the disk may be failing")
        except BaseException as error:
            with contextlib.suppress(StorageFailed):
                _in_folder(folder, ["rm", "-f", partial], doing)
            if isinstance(error, StorageFailed) and (full := full_disk(self.device, error.message)):
                raise StorageFailed(full) from error
            if isinstance(error, OSError):
                raise StorageFailed(f"cannot {doing}: {error.strerror or error}") from error
            raise
        if how.progress is not None:
            size = local.stat().st_size
            how.progress(size, size)

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
    # A command that does not read its input would block the writer for longer than the time-out.
    threading.Thread(target=_feed, args=(process.stdin, data), daemon=True).start()
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise DeviceError(
            f"`{argv[0]}` took longer than {timeout_s:.0f} s and was killed. This machine may be busy: try again"
        ) from error
    until = time.monotonic() + EOF_GRACE_S
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    if out.full or err.full:
        raise DeviceError(f"`{argv[0]}` printed more than {OUTPUT_BYTES_MAX // 1024**2} MB; it exited with {exit_code}")
    return Result(argv, exit_code, out.text(), err.text())


def _feed(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stream:
        stream.write(data)


def _drain(stream: IO[bytes], buffer: LineBuffer) -> None:
    with stream:
        while data := stream.read1(65536):  # type: ignore[attr-defined]  # a pipe of Popen is a BufferedReader
            if not buffer.full:
                buffer.feed(data)


def _in_folder(folder: str, argv: Sequence[str], doing: str, source: BinaryIO | None = None) -> str:
    """Run a command in a folder, with the file `source` as its input. Return its output.

    Raises StorageFailed if the command fails. `doing` describes the purpose of the command in the message.
    """
    done = subprocess.run(
        in_folder(folder, argv, make=source is not None),
        stdin=source or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,
        umask=0o022,
    )
    if done.returncode:
        reason = done.stderr.strip()[-_ERROR_CHARS_MAX:]
        raise StorageFailed(f"cannot {doing}: {reason or f'exit code {done.returncode}'}")
    return done.stdout.strip()
