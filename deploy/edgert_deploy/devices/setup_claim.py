"""One host at a time sets a device up, or takes it down: a claim on the whole device, beside those on its models (`claim`).

A bootstrap is many commands over minutes. So it claims the device first (on_device/setup.sh), has the claim last as long
as each of its commands may, and does nothing more once another host has it. It runs out where a host has vanished; the
next command of the same host knows that it is over, and waits for nothing.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from edgert.errors import DeployUnderWay, DeviceError, EdgeRTError
from edgert_deploy.devices.claim_notes import SLOW_LINK_BYTES_PER_S, noted, read_note, who, write_note
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import ByteProgress, LineSink, Result, Transport

QUICK_S_MAX = 60.0
SPARE_S = 240.0  # beyond the end of the longest command under it; how long others wait for a host that vanished
# What EdgeRT makes in a state folder, and in HOME, which may be the same one; `grep -xE` reads it.
KNOWN = (
    r"keys|models|incoming|spool|claims|cache|learned|config\.toml|control\.sock|edgert\.sock|edgertd\.(pid|log|log\.1)"
    r"|mqtt-(password|ca\.pem)|restart-due|lost\+found|\..*\.part|venvs?|wheels|previous|runtime\.sh|receipt|lock|setup|working"
    r"|trial|outcome|unit\.before|(venv|previous|trial|outcome|setup|unit\.before)\.new"
)
_OTHERS, _FOREIGN, _TRIES = 75, 73, 76
_NONE = "none"
_NOTE = "/setup"  # no model is called so


@contextmanager
def setting_up(device: Device, transport: Transport, *, make: bool = True) -> Iterator[Transport]:
    """A transport whose commands run only as long as this host has the claim on `device`.

    Without `make`, a device that was never set up is left as it is, and not claimed. Raises DeployUnderWay where another
    one sets it up, and DeviceError where its folders hold what is not EdgeRT's.
    """
    with noted(device, _NOTE, "another bootstrap or unbootstrap") as note:
        if not device.kind.needs_runtime:
            yield transport
            return
        old = read_note(note)
        token = secrets.token_hex(8)
        lasts_s = QUICK_S_MAX + SPARE_S
        begun = time.monotonic()
        by = re.sub(r"[^\x20-\x7e]", "?", who())
        words = ("take", device.home, device.state, token, f"{lasts_s:.0f}", by, old, "yes" if make else "no", KNOWN)
        if _asked(device, transport, words).stdout.strip() == _NONE:
            yield transport
            return
        write_note(note, token)
        try:
            yield _Claimed(device, transport, token, begun + lasts_s)
        finally:
            with contextlib.suppress(EdgeRTError):  # a link that is down: it runs out there, and is noted here
                _asked(device, transport, ("free", device.home, token))
                write_note(note, "")


def check_not_set_up(device: Device, transport: Transport) -> None:
    """Raises DeployUnderWay where somebody sets `device` up at this moment, or where it tries a new runtime."""
    if not device.kind.needs_runtime:
        return
    with noted(device, _NOTE, "a bootstrap or unbootstrap") as note:
        over = read_note(note)
    _asked(device, transport, ("look", device.home, over))


def note_folders(device: Device, folders: Sequence[str], transport: Transport) -> None:
    """Write down which folders are about to be made, so that `unbootstrap` takes away no other."""
    _asked(device, transport, ("note", device.home, *folders))


class _Claimed:
    """The transport under it, the claim renewed before each command that it would not outlast."""

    def __init__(
        self,
        device: Device,
        transport: Transport,
        token: str,
        until: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._transport, self._token, self._until, self._clock = device, transport, token, until, clock

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        self._keep(timeout_s)
        return self._transport.run(argv, timeout_s, input, on_stderr)

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
        self._keep(QUICK_S_MAX + local.stat().st_size / SLOW_LINK_BYTES_PER_S)
        self._transport.put(local, remote, progress, mode, resumable=resumable, bytes_per_s=bytes_per_s)

    def get(self, remote: str, local: Path) -> None:
        self._keep(QUICK_S_MAX)
        self._transport.get(remote, local)

    def close(self) -> None:
        self._transport.close()

    def _keep(self, seconds: float) -> None:
        begun = self._clock()
        if begun + seconds <= self._until:
            return
        lasts_s = seconds + SPARE_S
        _asked(self._device, self._transport, ("keep", self._device.home, self._token, f"{lasts_s:.0f}"))
        self._until = begun + lasts_s


def _asked(device: Device, transport: Transport, words: Sequence[str]) -> Result:
    script = (files("edgert_deploy") / "bootstrap" / "on_device" / "setup.sh").read_text()
    result = transport.run(["sh", "-c", script, "sh", *words], QUICK_S_MAX)
    said = result.stdout.strip()
    if result.exit_code == _OTHERS:
        raise DeployUnderWay(
            f"a bootstrap or unbootstrap works on {device.name} ({said}): it was left alone; try again when that is over"
        )
    if result.exit_code == _TRIES:
        raise DeployUnderWay(
            f"{device.name} is trying a new runtime and decides by itself, within {said} s: it was left alone; deploy again "
            f"then. Where it has not decided by that time, this ends the trial: edgert bootstrap {device.name}"
        )
    if result.exit_code == _FOREIGN:
        raise DeviceError(
            f"{device.name}: {said}, and EdgeRT keeps only its own things there; nothing was changed: edgert device remove "
            f"{device.name}, then add it again with a --home and a --state of its own"
        )
    if not result.ok:
        raise DeviceError(f"{device.name}: its folder {device.home} cannot be used: {result.stderr.strip()[-300:]}")
    return result
