"""The transport interface: run a command on a device, copy a file to the device.

A new transport is one file here, one entry in `TRANSPORTS` and one case in `tests/host/devices/test_transports.py`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from edgert.environment import Result as Result  # the result of a command, for every transport
from edgert.errors import DeviceError, HostKeyMismatch, LoginRefused

if TYPE_CHECKING:
    from edgert_deploy.devices.inventory import Device, SshAddress


@dataclass(frozen=True)
class TransportKind:
    """The capabilities of one transport. They are known before the transport's module is imported.

    `implementation` is "module:Class". The class gets the device of the inventory, and connects at its first use.
    """

    implementation: str
    needs_runtime: bool  # bootstrap installs an environment and a service; if False, the device uses this host's Python
    sends_deltas: bool  # sending takes time, so the host sends only files that the device lacks
    uses_ssh: bool  # the address is [USER@]HOST[:PORT], the host key is pinned, and `ssh` opens a shell on the device


TRANSPORTS = {
    "ssh": TransportKind(
        "edgert_deploy.devices.transports.ssh:SshTransport", needs_runtime=True, sends_deltas=True, uses_ssh=True
    ),
    "local": TransportKind(
        "edgert_deploy.devices.transports.local:LocalTransport", needs_runtime=False, sends_deltas=False, uses_ssh=False
    ),
}
OUTPUT_BYTES_MAX = 16 * 1024**2  # `run` raises DeviceError if a command prints more
INPUT_BYTES_MAX = 1024**2
OTHER_BYTES = "other bytes"
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")  # texts in messages of the device's commands
EOF_GRACE_S = 2.0  # the longest wait for the end of the pipes, which a command's remaining child may keep open

# sha256sum reads stdin, because with the name of a file, it may print a line with escapes.
_HAS_SHA256 = 'command -v sha256sum >/dev/null || { echo "sha256sum is missing: install coreutils" >&2; exit 127; }\n'
_SHA256 = f"""{_HAS_SHA256}\
for path in "$@"; do line=$(sha256sum <"$path") && echo "${{line%% *}}" || exit 1; done"""
# If the link was lost after the rename, the partial file is missing, and the upload has its final name already.
_RENAME = f"""{_HAS_SHA256}\
test -e "$1" && here=$1 || here=$2
line=$(sha256sum <"$here") || exit 1
test "${{line%% *}}" = "$3" || {{ echo {OTHER_BYTES}; exit; }}
test "$here" = "$2" && exit
test ! -d "$2" || {{ echo "$2 is a folder" >&2; exit 1; }}
exec mv -f "$1" "$2\""""


class JumpKeyMismatch(HostKeyMismatch):
    """The host key of the jump host in front of the device differs from the pinned key."""


class SshLoginRefused(LoginRefused):
    """The device or its jump host refuses the login: `reason`. The message ends with `next_step`.

    `key_missing_at` is the machine that accepts none of the keys; None if another next step is necessary.
    """

    def __init__(
        self,
        reason: str,
        next_step: str = "",
        key_missing_at: SshAddress | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(_with_step(reason, next_step), retry_after_s=retry_after_s)
        self.reason, self.next_step = reason, next_step
        self.key_missing_at = key_missing_at


class CommandNotStarted(DeviceError):
    """Sudo or the login shell did not run a command: `reason`. The message ends with `next_step`."""

    def __init__(self, reason: str, next_step: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(_with_step(reason, next_step), retry_after_s=retry_after_s)
        self.reason, self.next_step = reason, next_step


def _with_step(reason: str, next_step: str) -> str:
    return f"{reason}. {next_step}" if next_step else reason


LineSink = Callable[[str], None]
ByteProgress = Callable[[int, int], None]  # bytes so far, bytes in total


@dataclass(frozen=True)
class PutOptions:
    """The options of `Transport.put`.

    Attributes:
        progress: Receives the bytes so far and the bytes in total.
        resumable: Whether the bytes of a failed upload stay. The next upload of the same content continues after them.
        bytes_per_s: The highest speed; 0 means no limit.
    """

    progress: ByteProgress | None = None
    mode: int = 0o644
    resumable: bool = False
    bytes_per_s: float = 0.0


PLAIN = PutOptions()


class Transport(Protocol):
    """A connection to one device, for one thread at a time.

    Every method raises DeviceUnreachable if the device cannot be reached or the link is lost, and HostKeyMismatch if
    another machine answers.
    """

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        """Run `argv` on the device, without a shell, and wait for its end.

        `on_stderr` receives each line of stderr at once. Raises DeviceError if the command takes longer than
        `timeout_s` or prints more than OUTPUT_BYTES_MAX.
        """
        ...

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        """Replace `remote` with a complete copy of `local`, or leave `remote` unchanged.

        Missing parent folders are created. Raises StorageFailed if the device's disk fails.
        """
        ...

    def close(self) -> None:
        """Close the link; a later call opens it again."""
        ...


def full_disk(device: Device, reason: str) -> str:
    """Return a message with advice if `reason` says that the device's disk is full, else ""."""
    if not (found := [text for text in _FULL_TEXTS if text in reason]):
        return ""
    return (
        f"the disk of {device.name} is full ({found[0]}), so the file was not stored. Free some space there: "
        f"{device.state}/cache may be removed at any time, and journalctl --vacuum-size=50M shrinks the system's log"
    )


def open_transport(device: Device) -> Transport:
    """Return the transport of `device`, not connected yet. Raises ConfigInvalid for an unknown transport."""
    return cast(Transport, pkgutil.resolve_name(device.kind.implementation)(device))


def sha256_command(*paths: str) -> list[str]:
    """Return a command that prints each file's SHA-256 as hex, one a line. It fails if one is unreadable."""
    return ["sh", "-c", _SHA256, "sh", *paths]


def rename_command(partial: str, name: str, digest: str) -> list[str]:
    """Return a command that renames `partial` to `name` if the SHA-256 of `partial` is `digest`.

    If the SHA-256 differs, the command prints OTHER_BYTES.
    """
    return ["sh", "-c", _RENAME, "sh", partial, name, digest]


def in_folder(folder: str, argv: Sequence[str], *, make: bool = False) -> list[str]:
    """Return a command that runs `argv` in `folder`. If `make`, the command creates a missing folder.

    Paths in `argv` are relative to `folder`. Root acts as the owner of `folder`, and follows no link that another user
    could have made.
    """
    script = (files("edgert_deploy") / "devices" / "on_device" / "in_folder.sh").read_text()
    return ["sh", "-c", script, "sh", "yes" if make else "no", folder, *argv]


class LineBuffer:
    """Keeps the output of a command, and passes complete lines to a sink."""

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
        """Return all output so far. Pass a last line without a newline to the sink."""
        if self._sink is not None and self._line:
            self._sink(self._line.decode(errors="replace"))
            self._line = b""
        return self._kept.decode(errors="replace")

    @property
    def full(self) -> bool:
        return len(self._kept) > OUTPUT_BYTES_MAX
