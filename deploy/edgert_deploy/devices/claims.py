"""Claims: one deployment at a time changes a model, and one host at a time sets a device up.

A deployment claims its model through `edgertd` (edgert.versions.claims), in STATE. A bootstrap claims the whole device
with a shell script (on_device/claim.sh), in HOME, for two reasons. First, the device may have no runtime yet. Second,
root may run the script, but root must not write into STATE, which belongs to the less trusted user of the daemon. A
deployment and a bootstrap each take their own claim first, and then check for the other claim. So if both start at the
same time, at least one of them stops.

This host records the token of each claim, under a lock that ends with the process. So a second command on this host is
refused without contact to the device. If a process dies or loses the link, its claim stays on the device. The next
command on this host sends the recorded tokens. So it replaces a claim of its own kind, and a set-up releases the claims
of models. Other hosts must wait until the claim expires. A token is recorded before the device has it, because the
process may die, or the link may break, before the answer.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from edgert.checks.status import DeviceStatus
from edgert.durable import locked, os_error_as
from edgert.durations import duration_text
from edgert.errors import ConfigInvalid, DeployUnderWay, DeviceError, EdgeRTError, StorageFailed
from edgert.versions.claims import LASTS_S_MAX
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon, answer_of
from edgert_deploy.devices.transports import PLAIN, LineSink, PutOptions, Result, Transport, full_disk

LASTS_S = 60.0  # the duration of a model's claim; commands on the device renew it while they run
SPARE_S = 240.0  # the claim of a set-up lasts this much longer than the time limit of the running command
SLOW_LINK_BYTES_PER_S = 50_000  # the slowest transfer for which a claim lasts long enough
TOKENS_MAX = 3  # the tokens in a record: the newest, and older ones that the device may still have
RECORD_BYTES_MAX = 500
# EdgeRT makes these files in STATE and in HOME, which may be the same folder. `grep -xE` reads the pattern.
OWN_FILES = (
    r"keys|models|incoming|spool|claims|cache|learned|config\.toml|control\.sock|edgert\.sock|edgertd\.(pid|log|log\.1)"
    r"|mqtt-(password|ca\.pem)|registry-(login|ca\.pem)|restart-due|lost\+found|\..*\.part|venvs?|wheels"
    r"|previous|runtime\.sh|receipt|lock|setup|working|trial|outcome|unit\.before|(venv|previous|trial|outcome|setup|unit\.before)\.new"
    r"|(latest_time|revoked_keys)\.json|\.(latest_time|revoked_keys)\.json\.new|latest_time\.lock|follow"
)
_SET_UP = "/setup"  # stands for the name of the model in the record of a set-up; no model has this name
# The exit codes of the script.
_FOREIGN = 73  # a folder holds other files than those of EdgeRT
_TAKEN = 75  # another host has the claim
_RUNTIME_TRIAL = 76  # a new runtime is on trial
_UNWRITABLE = 77  # a folder cannot be written
_NOT_SET_UP = "none"


@dataclass(frozen=True)
class HeldClaim:
    """The claim of a deployment on one model of a device: no other deployment changes the model.

    `facts` is the status of the device under the claim. `has` is the answer of `edgertd list-files`; None if the slots
    are damaged.
    """

    daemon: RemoteDaemon
    token: str
    facts: DeviceStatus
    has: dict[str, Any] | None = None

    def call(self, *words: str, timeout_s: float = QUICK_S_MAX) -> dict[str, Any]:
        """Call `edgertd WORDS` under the claim. Raises DeployUnderWay, and the errors of RemoteDaemon.call."""
        return self.daemon.call(*words, "--claim", self.token, timeout_s=timeout_s)


@contextmanager
def claimed(daemon: RemoteDaemon, model: str, send_bytes: int = 0, bytes_per_s: float = 0.0) -> Iterator[HeldClaim]:
    """Claim `model` on the device.

    The claim lasts long enough to send `send_bytes` on a slow link, or at `bytes_per_s` if this is not 0. Raises
    DeployUnderWay if another deployment has the claim, or if a host is setting the device up.
    """
    slowest = min(bytes_per_s or SLOW_LINK_BYTES_PER_S, SLOW_LINK_BYTES_PER_S)
    lasts_s = min(LASTS_S + send_bytes / slowest, LASTS_S_MAX)
    with _locked_record(daemon.device, model, f"another deployment of {model}") as note:
        token = f"{model}.{secrets.token_hex(8)}"  # a model's name has no dot
        with _token_recorded(note, token) as past:
            instead = [word for old in past for word in ("--instead-of", old)]
            words = ("--by", user_and_host(), "--for", duration_text(lasts_s), "--token", token, *instead)
            answer = daemon.call("claim", model, *words)
        try:
            _write(note, token)
            check_not_set_up(daemon.device, daemon.transport)
            facts = answer_of(DeviceStatus, answer["status"])
            others = tuple(claim for claim in facts.claims if claim.model != model)
            yield HeldClaim(daemon, token, daemon.named(replace(facts, claims=others)), answer.get("here"))
        finally:
            with contextlib.suppress(EdgeRTError):
                # If the link is lost, the claim expires on the device, and its token stays recorded on this host.
                daemon.call("unclaim", token)
                _write(note)


@contextmanager
def setting_up(device: Device, transport: Transport, *, make: bool = True) -> Iterator[Transport]:
    """Claim the whole device; yield a transport that runs commands only while this host has the claim.

    With `make` False, the function neither changes nor claims a device that was never set up.

    Raises DeployUnderWay if another host sets the device up or deploys to it, StorageFailed if the device's disk is
    full, and DeviceError if the device's folders hold other files or cannot be written.
    """
    with _locked_record(device, _SET_UP, "another bootstrap or uninstall") as note:
        if not device.kind.needs_runtime:
            _check_not_deploying(device, transport)
            yield transport
            return
        token, lasts_s, begun = secrets.token_hex(8), QUICK_S_MAX + SPARE_S, time.monotonic()
        by = re.sub(r"[^\x20-\x7e]", "?", user_and_host())
        with _token_recorded(note, token) as past:
            words = ("take", device.home, device.state, token, f"{lasts_s:.0f}", by, " ".join(past))
            taken = _script(device, transport, (*words, "yes" if make else "no", OWN_FILES))
        if taken.stdout.strip() == _NOT_SET_UP:
            _write(note, *past)
            yield transport
            return
        try:
            _write(note, token)
            _check_not_deploying(device, transport)
            yield _Claimed(device, transport, token, begun + lasts_s)
        finally:
            with contextlib.suppress(EdgeRTError):
                _script(device, transport, ("free", device.home, token))
                _write(note)


def check_not_set_up(device: Device, transport: Transport) -> None:
    """Raise DeployUnderWay if a host is setting `device` up, or if the device tries a new runtime."""
    if not device.kind.needs_runtime:
        return
    with _locked_record(device, _SET_UP, "a bootstrap or uninstall") as note:
        past = _read(note)
    _script(device, transport, ("look", device.home, " ".join(past)))


def record_folders(device: Device, folders: Sequence[str], transport: Transport) -> None:
    """Record on the device the folders that bootstrap will create; an uninstall removes only these."""
    _script(device, transport, ("note", device.home, *folders))


def _check_not_deploying(device: Device, transport: Transport) -> None:
    """Raise DeployUnderWay if a deployment has the claim of a model, or if the daemon watches a trial.

    A restart of the daemon cuts a watch off, and the device then rolls the version back. First release the claims that
    dead deployments of this host left.
    """
    daemon = RemoteDaemon(transport, device)
    try:
        status = daemon.status()
    except EdgeRTError:  # a set-up also installs, repairs or removes a runtime that does not answer
        return
    if status.claims and _release_own(daemon, [claim.model for claim in status.claims]):
        status = daemon.status()
    for claim in status.claims:
        raise DeployUnderWay(
            f"a deployment of {claim.model} is in progress on {device.name} (since {claim.since}, by {claim.by}). Nothing was "
            f"changed; try again when it has ended. If that host has disappeared, its claim expires in {claim.left_s:.0f} s"
        )
    for model in status.models:
        if model.serving is not None and (trial := model.serving.trial) is not None and trial.under_way:
            raise DeployUnderWay(
                f"{device.name} watches the limits of release {trial.release} of {model.model} for {trial.left_s:.0f} s more, "
                "and a restart of its daemon would end the trial. Nothing was changed; try again after this time, or end the "
                f"trial with: edgert rollback {model.model} {device.name}"
            )


def _release_own(daemon: RemoteDaemon, models: Sequence[str]) -> bool:
    """Release the claims that dead deployments of this host left; return False if there are none.

    Raises DeployUnderWay if a deployment of this host is in progress.
    """
    past = []
    for model in models:
        with _locked_record(daemon.device, model, f"a deployment of {model}") as note:
            past += _read(note)
    for token in past:
        daemon.call("unclaim", token)
    return bool(past)


class _Claimed:
    """A transport that renews the claim before each command that may last longer than the claim."""

    def __init__(self, device: Device, transport: Transport, token: str, until: float) -> None:
        self._device, self._transport, self._token, self._until = device, transport, token, until

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        self._renew(timeout_s)
        return self._transport.run(argv, timeout_s, input, on_stderr)

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        self._renew(QUICK_S_MAX + local.stat().st_size / SLOW_LINK_BYTES_PER_S)
        self._transport.put(local, remote, how)

    def close(self) -> None:
        self._transport.close()

    def _renew(self, seconds: float) -> None:
        begun = time.monotonic()
        if begun + seconds > self._until:
            lasts_s = seconds + SPARE_S
            _script(self._device, self._transport, ("keep", self._device.home, self._token, f"{lasts_s:.0f}"))
            self._until = begun + lasts_s


def _script(device: Device, transport: Transport, words: Sequence[str]) -> Result:
    """Run the script of set-up claims. Raises DeployUnderWay, DeviceError or StorageFailed."""
    script = (files("edgert_deploy") / "devices" / "on_device" / "claim.sh").read_text()
    result = transport.run(["sh", "-c", script, "sh", *words], QUICK_S_MAX)
    printed = result.stdout.strip()
    if result.exit_code == _TAKEN:
        raise DeployUnderWay(
            f"a bootstrap or uninstall is in progress on {device.name} ({printed}). Nothing was changed; try again when it has ended"
        )
    if result.exit_code == _RUNTIME_TRIAL:
        raise DeployUnderWay(
            f"{device.name} is trying a new runtime and decides within {printed} s. Nothing was changed; try again after "
            f"this time. If the trial does not end, end it with: edgert bootstrap {device.name}"
        )
    if result.exit_code == _FOREIGN:
        raise DeviceError(
            f"{device.name}: {printed}, and EdgeRT needs a folder of its own. Nothing was changed. Run edgert device "
            f"remove {device.name}, then add it again with another --home and --state"
        )
    if result.exit_code == _UNWRITABLE:
        raise DeviceError(
            f"{device.name}: {printed}: it is read-only or another user's. Nothing was sent. Make it writable; or run edgert "
            f"device remove {device.name}, then add it again with another --home and --state"
        )
    if full := full_disk(device, result.stderr):
        raise StorageFailed(full)
    if not result.ok:
        raise DeviceError(f"{device.name}: its folder {device.home} cannot be used: {result.stderr.strip()[-300:]}")
    return result


def check_recordable() -> None:
    """Raise ConfigInvalid if this host cannot record its claims, without which it can change no device."""
    with _writing(ConfigInvalid):
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=_folder()) as file:
            file.write(b"0")


@contextmanager
def _locked_record(device: Device, what: str, other: str) -> Iterator[int]:
    """Lock this host's record of its last token for `what`.

    If another process has locked the record, raise DeployUnderWay with a message that names `other`.
    """
    folder = _folder()
    name = hashlib.sha256("\0".join((device.transport, device.address, device.state, what)).encode()).hexdigest()[:24]
    busy = DeployUnderWay(f"{other} is in progress on {device.name} from this host; wait until it ends")
    with _writing(ConfigInvalid, busy):
        folder.mkdir(parents=True, exist_ok=True)
        note = locked(folder / name, wait_s=0)
    with note:
        yield note.fileno()


@contextmanager
def _token_recorded(note: int, token: str) -> Iterator[list[str]]:
    """Record `token` while the device is asked for a claim; yield the tokens of earlier claims.

    If another host has the claim, the record stays as it was.
    """
    past = _read(note)
    _write(note, token, *past[: TOKENS_MAX - 1])
    try:
        yield past
    except DeployUnderWay:
        _write(note, *past)
        raise


def _read(note: int) -> list[str]:
    return os.pread(note, RECORD_BYTES_MAX, 0).decode(errors="replace").split()


def _write(note: int, *tokens: str) -> None:
    with _writing(StorageFailed):
        os.ftruncate(note, 0)
        os.pwrite(note, " ".join(tokens).encode(), 0)


def _writing(kind: type[EdgeRTError], busy: EdgeRTError | None = None) -> AbstractContextManager[None]:
    advice = "free some space, or set XDG_CACHE_HOME to a folder of yours"
    return os_error_as(kind, f"cannot write {_folder()} on this host", advice, busy)


def _folder() -> Path:
    return cache_folder() / "claims"


def user_and_host() -> str:
    """Return USER@HOST of this process, for messages on other hosts."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
