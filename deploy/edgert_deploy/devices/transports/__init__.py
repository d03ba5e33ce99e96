"""The transport seam: run a command on a device, move a file there or back. Nothing here knows what EdgeRT is.

Adding a transport is one file here, one line in `TRANSPORTS` and one row in `tests/host/devices/test_transports.py`.
"""

from __future__ import annotations

import importlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from edgert_deploy.devices.inventory import Device


@dataclass(frozen=True)
class TransportKind:
    """What the devices of one transport have in common. It is known before the transport's module is imported.

    `implementation` is "module:Class"; the class takes the device of the inventory and connects when it is first used.
    """

    implementation: str
    needs_runtime: bool  # bootstrap installs a Python environment and a service there; else this host's Python serves
    sends_deltas: bool  # bytes cost time: files that the device has are not sent
    uses_ssh: bool  # the address is [USER@]HOST[:PORT], the host key is pinned, `ssh` opens a shell there


TRANSPORTS = {
    "ssh": TransportKind(
        "edgert_deploy.devices.transports.ssh:SshTransport", needs_runtime=True, sends_deltas=True, uses_ssh=True
    ),
    "local": TransportKind(
        "edgert_deploy.devices.transports.local:LocalTransport", needs_runtime=False, sends_deltas=False, uses_ssh=False
    ),
}
OUTPUT_BYTES_MAX = 16 * 1024**2  # what one command may print before it is given up
INPUT_BYTES_MAX = 1024**2
EOF_GRACE_S = 2.0  # a command that left a child behind keeps its pipes open: its answer is complete without it
TAIL_CHARS = 800

_SHA256_PYTHON = (
    "import hashlib,sys\n"
    "for path in sys.argv[1:]:\n"
    "    digest = hashlib.sha256()\n"
    "    with open(path, 'rb') as file:\n"
    "        for chunk in iter(lambda: file.read(1 << 20), b''): digest.update(chunk)\n"
    "    print(digest.hexdigest())\n"
)
# From stdin, sha256sum prints no name that would have to be unescaped.
_SHA256 = f"""\
if command -v sha256sum >/dev/null; then
  for path in "$@"; do line=$(sha256sum <"$path") && echo "${{line%% *}}" || exit 1; done
elif command -v python3 >/dev/null; then
  exec python3 -c "{_SHA256_PYTHON}" "$@"
else
  echo "neither sha256sum nor python3 is there: install coreutils" >&2; exit 127
fi"""

LineSink = Callable[[str], None]
ByteProgress = Callable[[int, int], None]  # bytes that are there, bytes in all


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def complaint(self) -> str:
        """One readable line for a message: the command, its exit code, the end of what it said."""
        said = (self.stderr.strip() or self.stdout.strip())[-TAIL_CHARS:]
        return f"`{shlex.join(self.argv)[:200]}` ended with {self.exit_code}: {said or 'it said nothing'}"


class Transport(Protocol):
    """A way to one device. One thread at a time uses it.

    Every method raises DeviceUnreachable when the device cannot be reached or the link dies, and
    HostKeyMismatch when another machine answers in its place.
    """

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        """Run `argv` there and wait for its end; no shell reads the words. `on_stderr` gets each line as it comes.

        Raises DeviceError when it takes longer than `timeout_s` or prints more than OUTPUT_BYTES_MAX.
        """
        ...

    def put(
        self,
        local: Path,
        remote: str,
        progress: ByteProgress | None = None,
        mode: int = 0o644,
        *,
        resumable: bool = False,
        bytes_per_s: float = 0.0,
    ) -> None:
        """Make `remote` a copy of `local`, whole and with the same SHA-256, or leave what was there.

        Folders above it are made. What arrived of a `resumable` one stays, also when this fails, and the next call
        with the same content goes on there. `bytes_per_s` bounds the speed; 0 does not. Raises StorageFailed when the
        device's disk refuses it.
        """
        ...

    def get(self, remote: str, local: Path) -> None:
        """Make `local` a copy of `remote`, whole, or leave what was there. Raises StorageFailed."""
        ...

    def close(self) -> None:
        """Let the link go; a later call opens it again."""
        ...


def open_transport(device: Device) -> Transport:
    """Return the transport of `device`, not connected yet. Raises ConfigInvalid for an unknown one."""
    module, _, cls = device.kind.implementation.partition(":")
    return cast(Transport, getattr(importlib.import_module(module), cls)(device))


def sha256_command(*paths: str) -> list[str]:
    """Words that print the SHA-256 of each file that is there, one a line as hex; by python3 where sha256sum is missing.

    Exits with another code than 0 where one cannot be read.
    """
    return ["sh", "-c", _SHA256, "sh", *paths]


class Pace:
    """Holds a sender down to `bytes_per_s` (0: does not). Time that went by unused is not made up for."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep, self._free_at = bytes_per_s, clock, sleep, 0.0

    def passed(self, size_bytes: int) -> None:
        """Wait until so many bytes may have gone."""
        if self._bytes_per_s > 0:
            now = self._clock()
            self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
            self._sleep(self._free_at - now)


class LineBuffer:
    """Bytes in, whole lines out to a sink; all bytes are kept, up to OUTPUT_BYTES_MAX."""

    def __init__(self, sink: LineSink | None = None) -> None:
        self._sink = sink
        self._kept = bytearray()
        self._line = b""

    def feed(self, data: bytes) -> None:
        self._kept += data
        if self._sink is None:
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._sink(line.decode(errors="replace").rstrip("\r"))

    def text(self) -> str:
        """Everything so far; hands out a last line that has no newline."""
        if self._sink is not None and self._line:
            self._sink(self._line.decode(errors="replace"))
            self._line = b""
        return self._kept.decode(errors="replace")

    @property
    def full(self) -> bool:
        return len(self._kept) > OUTPUT_BYTES_MAX
