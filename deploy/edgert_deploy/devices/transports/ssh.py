"""SSH through Fabric: one connection with a pinned host key (`ssh_login`). Each wait has a limit.

A file is sent to `dd` over an ordinary command channel, because many small systems lack SFTP.

A link can be lost without an error. So keepalives cause traffic, TCP_USER_TIMEOUT ends a connection without
acknowledgements, and each channel has a time-out. After a loss, an upload continues where it stopped. The upload fails
if several attempts in a row make no progress. The name of its partial file is used only for the same content. The hash
is compared before the final rename.
"""

from __future__ import annotations

import contextlib
import re
import select
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fabric
import paramiko

from edgert.backoff import Backoff
from edgert.durable import sha256_of
from edgert.errors import DeviceError, DeviceUnreachable, HostKeyMismatch, StorageFailed
from edgert.printable import file_error
from edgert.rate_limit import RateLimit
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import (
    EOF_GRACE_S,
    INPUT_BYTES_MAX,
    OTHER_BYTES,
    OUTPUT_BYTES_MAX,
    PLAIN,
    CommandNotStarted,
    LineBuffer,
    LineSink,
    PutOptions,
    Result,
    full_disk,
    in_folder,
    rename_command,
)
from edgert_deploy.devices.transports.ssh_login import LinkLimits, log_in

_CHUNK_BYTES = 32 * 1024  # the size of a channel packet of OpenSSH; an upload continues at a multiple of this size
# Each block has a fixed position in the file, so a late write of a lost channel does no harm. The mode is set before
# the first byte, because the file may be a secret.
_RECEIVE = 'umask 077; export LC_ALL=C; : >>"$1" && chmod "$2" "$1" && exec dd of="$1" bs="$3" seek="$4" conv=notrunc'
_SIZE = 'test ! -e "$1" || wc -c <"$1"'
_UPLOADS_MAX = 2  # a second upload is necessary if the first upload continued a damaged file
_MOVED_BYTES = 256 * 1024  # an attempt that sends this many bytes resets the count of failures, because the link works
_SAID_CHARS_MAX = 300
_BEGIN = "edgert-command-begins"
# A login may set these variables, as ROS does. Then the Python of EdgeRT's environment would import other packages.
_CLEAN = "umask 022; unset PYTHONHOME PYTHONPATH"
# Sudo may have its own umask, its own variables, and a secure_path without useradd.
_AS_ROOT = ("sh", "-c", f'{_CLEAN}; export PATH="$PATH:/usr/sbin:/sbin"; echo {_BEGIN}; exec "$@"', "sh")
LINE_BYTES_MAX = 8000  # the limit for a command's line: dropbear closes the connection at 9000
_LINE_FROM_INPUT = ("sh", "-c", 'line=$(cat); exec sh -c "$line" </dev/null')
SUDO = ("sudo", "-n", "--")  # with -n, sudo fails if it needs a password
# A part of sudo's message -> the change that it needs.
_SUDO_STEPS = {
    "tty": "Let this user run sudo without a terminal (visudo: Defaults:NAME !requiretty)",
    "not found": "Install sudo there",
    "": "Allow this user sudo without a password (visudo: NAME ALL=(ALL) NOPASSWD: ALL)",
}
HASH_S_MAX = 600.0
_STEP_S_MAX = 30.0  # the limit of one step of an upload that sends no bytes
_NOTICE_S = 0.5
_SESSION_PAUSE_S = 0.05  # the pause before the next request, if sshd refused a session
_POLL_MS = 100  # the longest wait for output, so that the time limit of a command takes effect
_ENDING_POLL_S = 0.01  # the pause between two checks of a command whose output has ended
_READ_BYTES = 64 * 1024
_NO_EXIT_CODE = -1  # paramiko's value if the channel closed without an exit code, after a loss of the link or a signal


T = TypeVar("T")


@dataclass
class _Upload:
    """An upload into the file `partial` of `folder`, which becomes the file `name`.

    `partial` had `arrived` bytes at the last check. If `may_be_there`, an earlier attempt may have sent some bytes.
    """

    local: Path
    folder: str
    name: str
    partial: str
    size: int
    how: PutOptions
    rate_limit: RateLimit
    may_be_there: bool
    arrived: int = 0


def for_any_shell(argv: Sequence[str], first: str = ":") -> str:
    """Return a line that makes any login shell, including csh and fish, run `first` and then `argv`.

    csh accepts no quoted line break, and expands a quoted exclamation mark. fish interprets quoted backslashes. So the
    line encodes these characters. The line sets the umask: no other user can write files that the command creates.
    """
    script = f"{_CLEAN}; {first}; exec {shlex.join(argv)}"
    octal = re.sub(r"[\\\n!']", lambda found: f"\\0{ord(found[0]):03o}", script)
    return f"""exec sh -c 'eval "$(printf %b "$1")"' sh '{octal}'"""


class SshTransport:
    """A `Transport` over one SSH connection, opened at the first call, and opened again after a loss."""

    def __init__(self, device: Device, limits: LinkLimits | None = None) -> None:
        self.device = device
        self.limits = limits or LinkLimits()
        self._connection: fabric.Connection | None = None
        self._stack = contextlib.ExitStack()  # closes the connection

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        assert len(input) <= INPUT_BYTES_MAX, "send files with put"
        line = self._line(argv)
        if len(line) > LINE_BYTES_MAX and not input:
            input, line = line.encode(), for_any_shell(_LINE_FROM_INPUT)
        with self._translated(), contextlib.closing(self._channel(line)) as channel:
            channel.sendall(input)
            channel.shutdown_write()
            ended = self._wait_for_end(channel, argv, timeout_s, on_stderr)
            # .bashrc may have printed lines before the command began.
            printed_before, began, output = ended.stdout.partition(f"{_BEGIN}\n")
            if not began:
                printed = " ".join(f"{printed_before} {ended.stderr}".split())[-_SAID_CHARS_MAX:]
                raise self._start_error(f"{printed or 'no output'} (exit code {ended.exit_code})")
            return replace(ended, stdout=output)

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        digest, target = sha256_of(local), PurePosixPath(remote)
        # Two uploads with one name write the same bytes at the same offsets. The name of a secret contains no hash.
        partial = f"./.{target.name}.{digest[:32] if how.resumable else uuid.uuid4().hex}.part"
        size, rate_limit = local.stat().st_size, RateLimit(how.bytes_per_s)
        upload = _Upload(local, str(target.parent), f"./{target.name}", partial, size, how, rate_limit, how.resumable)
        remove = in_folder(upload.folder, ["rm", "-f", partial])
        try:
            for _ in range(_UPLOADS_MAX if how.resumable else 1):
                self._retry(lambda: self._upload(upload), upload)
                if self._retry(lambda: self._rename(upload, digest), upload):
                    return
                self._run_checked(remove)  # the rest of an earlier upload was damaged: start again
            raise StorageFailed(
                f"{self.device.name}: {remote} arrived with different bytes. Send it again; if this repeats, a startup file "
                "of the login shell there (.bashrc) may read its input"
            )
        except BaseException:
            if not how.resumable:
                with contextlib.suppress(DeviceError, DeviceUnreachable, HostKeyMismatch):
                    self.run(remove, _STEP_S_MAX)
            raise

    def close(self) -> None:
        self._connection = None
        self._stack.close()

    def _open(self) -> fabric.Connection:
        if self._connection is None or not self._connection.is_connected:
            self.close()
            self._connection = log_in(self.device, self.limits, self._stack)
        return self._connection

    def _line(self, argv: Sequence[str]) -> str:
        if self.device.become:
            return for_any_shell([*SUDO, *_AS_ROOT, *argv])
        return for_any_shell(argv, f"echo {_BEGIN}")

    def _channel(self, line: str) -> Any:
        channel = self._session()
        channel.settimeout(self.limits.dead_after_s)
        channel.exec_command(line)
        return channel

    def _start_error(self, end: str) -> CommandNotStarted:
        """Return the error for a command that did not start, because sudo or the login shell did not run it."""
        if self.device.become:
            text = f"sudo did not run the command: {end}"
            step = next(step for part, step in _SUDO_STEPS.items() if part in end)
            step += ", log in as root, or add the device without --sudo"
        else:
            text = f"the login shell did not run EdgeRT's command: {end}"
            step = (
                "Log in as another user, or check on the device this user's shell and its startup files (.bashrc, .profile), "
                "ForceCommand in sshd_config, and command= in authorized_keys"
            )
        return CommandNotStarted(f"{self.device.name}: {text}", step)

    def _session(self) -> Any:
        """Open a channel.

        Repeat a refused request, because with `MaxSessions 1`, sshd refuses channels for a moment after a command.
        """
        until = time.monotonic() + self.limits.connect_s
        while True:
            try:
                return self._open().create_session()
            except paramiko.ChannelException as error:
                if time.monotonic() >= until:
                    raise DeviceUnreachable(
                        f"{self.device.name}: its SSH server opens no session: {error.text}. Look at the server's log, and at "
                        "MaxSessions in its configuration"
                    ) from error
                time.sleep(_SESSION_PAUSE_S)

    def _wait_for_end(
        self, channel: Any, argv: Sequence[str], timeout_s: float, on_stderr: LineSink | None = None
    ) -> Result:
        """Wait for the end of a command and return its result. Raises EOFError if the connection ends first."""
        out, err = LineBuffer(), LineBuffer(on_stderr)
        self._follow(channel, out, err, f"`{argv[0]}`", timeout_s)
        exit_code = channel.recv_exit_status()
        if exit_code == _NO_EXIT_CODE and not self._is_alive():
            raise EOFError("the connection ended while the command ran")
        return Result(tuple(argv), exit_code, out.text(), err.text())

    def _follow(self, channel: Any, out: LineBuffer, err: LineBuffer, what: str, timeout_s: float) -> None:
        """Collect the output until the command has ended and its pipes are empty."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        ended_at: float | None = None
        while True:
            while channel.recv_ready():
                out.feed(channel.recv(_READ_BYTES))
            while channel.recv_stderr_ready():
                err.feed(channel.recv_stderr(_READ_BYTES))
            now = time.monotonic()
            if out.full or err.full:
                limit = OUTPUT_BYTES_MAX // 1024**2
                raise DeviceError(f"{what} on {self.device.name} printed more than {limit} MB; its output was dropped")
            if channel.exit_status_ready():
                ended_at = ended_at or now
                empty = not channel.recv_ready() and not channel.recv_stderr_ready()
                if empty and (channel.eof_received or channel.closed or now > ended_at + EOF_GRACE_S):
                    return
            if now > deadline:
                if _BEGIN not in out.text():
                    raise self._start_error(f"it did not start within {timeout_s:.0f} s")
                raise DeviceError(
                    f"{what} on {self.device.name} took longer than {timeout_s:.0f} s. The device may be busy: try again"
                )
            # After the end of the output, the descriptor stays readable: `poll` would return at once.
            if channel.eof_received:
                time.sleep(_ENDING_POLL_S)
            else:
                poll.poll(_POLL_MS)

    def _retry(self, work: Callable[[], T], upload: _Upload) -> T:
        """Run `work`. Repeat it if the link is lost, up to `limits.attempts` times in a row without progress."""
        backoff, arrived = Backoff(self.limits.pauses_s), upload.arrived
        while True:
            try:
                with self._translated():
                    return work()
            except DeviceUnreachable as error:
                if not error.retryable:  # more refused logins could lock this host out
                    raise
                self.close()
                if upload.arrived >= arrived + _MOVED_BYTES:
                    backoff.reset()
                arrived, pause_s = max(arrived, upload.arrived), backoff.failed()
                if backoff.failures == self.limits.attempts:
                    raise DeviceUnreachable(f"{error.message}; {self.limits.attempts} attempts failed") from error
                time.sleep(pause_s)

    def _upload(self, upload: _Upload) -> None:
        """Send the part of the file that `partial` lacks."""
        there = ""
        if upload.may_be_there:
            look = in_folder(upload.folder, ["sh", "-c", _SIZE, "sh", upload.partial], make=True)
            there = self._run_checked(look).stdout.strip()
        upload.may_be_there = True
        blocks = min(int(there or 0), upload.size) // _CHUNK_BYTES
        upload.arrived = done = blocks * _CHUNK_BYTES
        words = [upload.partial, f"{upload.how.mode:o}", str(_CHUNK_BYTES), str(blocks)]
        argv = in_folder(upload.folder, ["sh", "-c", _RECEIVE, "sh", *words], make=True)
        with upload.local.open("rb") as source, contextlib.closing(self._channel(self._line(argv))) as channel:
            source.seek(done)
            while chunk := source.read(_CHUNK_BYTES):
                try:
                    channel.sendall(chunk)
                except TimeoutError:
                    raise
                except OSError:
                    if self._is_alive():  # the link works, so dd ended, and its message follows
                        break
                    raise
                done += len(chunk)
                if upload.how.progress is not None:
                    upload.how.progress(done, upload.size)
                upload.rate_limit.passed(len(chunk))
            with contextlib.suppress(OSError):  # the channel may be closed already
                channel.shutdown_write()
            ended = self._wait_for_end(channel, argv, HASH_S_MAX)  # the disk may be slow
        if not ended.ok:
            reason = " ".join(line for line in ended.stderr.splitlines() if "records" not in line).strip()
            raise StorageFailed(
                full_disk(self.device, reason)
                or f"{self.device.name}: writing {upload.folder}/{upload.partial[2:]} failed: "
                f"{reason or f'exit code {ended.exit_code}'}"
            )

    def _rename(self, upload: _Upload, digest: str) -> bool:
        """Rename an upload to its final name. Return False if its content is wrong."""
        named = self._run_checked(
            in_folder(upload.folder, rename_command(upload.partial, upload.name, digest)), HASH_S_MAX
        )
        return named.stdout.strip() != OTHER_BYTES

    def _run_checked(self, argv: Sequence[str], timeout_s: float = _STEP_S_MAX) -> Result:
        result = self.run(argv, timeout_s)
        if not result.ok:
            raise StorageFailed(full_disk(self.device, result.stderr) or f"{self.device.name}: {result.failure_text()}")
        return result

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the errors of paramiko and the socket."""
        name = self.device.name
        try:
            yield
        except (EOFError, TimeoutError, paramiko.SSHException, ConnectionError) as error:
            raise self._link_died(error) from error
        except OSError as error:
            # paramiko's errors for a lost channel have no errno. Errors with an errno are about files of this host.
            if error.errno is None:
                raise self._link_died(error) from error
            raise StorageFailed(file_error(error, name)) from error

    def _link_died(self, error: BaseException) -> DeviceUnreachable:
        self.close()
        ended = "no answer in time" if isinstance(error, TimeoutError) else "the device or the network ended it"
        reason = str(error) or ended  # the errors of an ended connection have no text
        return DeviceUnreachable(f"the link to {self.device.name} was lost: {reason}. Check the network and try again")

    def _is_alive(self) -> bool:
        """Return whether the connection is up. First give paramiko's thread time to notice a loss."""
        transport = None if self._connection is None else self._connection.transport
        if transport is None:
            return False
        transport.join(_NOTICE_S)
        return bool(transport.is_active())
