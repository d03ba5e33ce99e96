"""Claims: only one deployment changes a model at a time, so no deployment undoes steps of another.

A deployment consists of several commands over minutes, and no process on the device lasts that long. So the deployment
acquires a claim: a token with an end time. Each of its commands sends the token, which renews the claim. If the host
disappears, the claim expires by itself. A reboot also ends the claim. The device also accepts commands without a token,
because claims separate deployments but are not permissions.

    STATE/claims/<model>.json    the claim of a model, until its release
    STATE/claims/lock            locked while a command changes a claim
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from edgert.config import read_config
from edgert.durable import locked, make_private, replace_file, storing
from edgert.errors import ConfigInvalid, DeployUnderWay, EdgeRTError, StorageFailed
from edgert.state_dir import StateDir
from edgert.typed_json import json_bytes, read_json
from edgert.versions.boot_clock import BootClock

LASTS_S_MAX = 24 * 3600.0
CLAIMING_S = 60.0  # a running command renews its claim; the claim of a killed command expires after this time


@dataclass(frozen=True)
class Claim:
    """One deployment's claim on a model.

    Attributes:
        token: The secret text that identifies the claim; it starts with the model's name.
        by: The person and the host, for messages.
        since: The wall-clock time of the start, for messages.
        lasts_s: The time from each renewal to the end of the claim.
        boot_id: The boot whose clock `ends_at_s` refers to.
        ends_at_s: The end of the claim, in seconds of the boot clock.
    """

    token: str
    model: str
    by: str
    since: str
    lasts_s: float
    boot_id: str
    ends_at_s: float


class Claims:
    """The claims on the device `name`."""

    def __init__(self, state: StateDir, name: str, clock: BootClock | None = None) -> None:
        self.folder = state.claims
        self.name = name
        self.clock = clock or BootClock()

    def acquire(self, model: str, by: str, lasts_s: float, instead_of: Collection[str] = (), token: str = "") -> Claim:
        """Claim a model. Raises DeployUnderWay if another deployment has the model.

        Raises ConfigInvalid for an invalid `token`; "" stands for a new one.

        The claim lasts for `lasts_s` after each renewal, at most LASTS_S_MAX. It replaces a claim with a token in
        `instead_of`, whose deployment is over. `by` is the person and the host, for messages.
        """
        token = token or f"{model}.{secrets.token_hex(8)}"  # a model's name has no dot
        if not re.fullmatch(rf"{re.escape(model)}\.[0-9a-f]{{16}}", token):
            raise ConfigInvalid(
                f"the token {token[:80]!r} is not the model's name with a dot and 16 hexadecimal digits"
            )
        with self._locked():
            held = self._read(model)
            if held is not None and self.left_s(held) and held.token not in instead_of:
                raise DeployUnderWay(self._refusal(held))
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            return self._write(Claim(token, model, by, since, min(lasts_s, LASTS_S_MAX), "", 0.0))

    def renew(self, token: str) -> Claim:
        """Extend the claim `token` by its whole time. Raises DeployUnderWay if the claim has expired."""
        model = token.partition(".")[0]
        with self._locked():
            held = self._read(model)
            if held is None or held.token != token:
                raise DeployUnderWay(
                    f"the claim of this deployment on {model} has expired"
                    + (f"; {self._refusal(held)}" if held else ": start the deployment again")
                )
            return self._write(held)

    def release(self, token: str) -> None:
        """Release the claim `token`, unless another deployment now has the model."""
        model = token.partition(".")[0]
        with self._locked():
            held = self._read(model)
            if held is not None and held.token == token:
                path = self.folder / f"{model}.json"
                with storing(f"cannot remove {path}"):
                    path.unlink(missing_ok=True)

    def under_way(self) -> list[Claim]:
        """Return the claims that have not expired."""
        claims = [self._read(path.stem) for path in sorted(self.folder.glob("[!.]*.json"))]
        return [claim for claim in claims if claim is not None and self.left_s(claim)]

    def left_s(self, claim: Claim) -> float:
        """Return the seconds until `claim` expires if no command renews it."""
        return self.clock.left_s(claim.boot_id, claim.ends_at_s)

    def _refusal(self, claim: Claim) -> str:
        return (
            f"another deployment of {claim.model} is in progress on {self.name} (since {claim.since}, by {claim.by}): "
            f"wait until it ends, or until its claim expires in {self.left_s(claim):.0f} s unless it is renewed"
        )

    def _read(self, model: str) -> Claim | None:
        return read_json(Claim, self.folder / f"{model}.json")  # a claim damaged by a power cut is from another boot

    def _write(self, claim: Claim) -> Claim:
        lasting = replace(claim, boot_id=self.clock.boot_id, ends_at_s=self.clock.now_s() + claim.lasts_s)
        path = self.folder / f"{claim.model}.json"
        with storing(f"cannot write {path}"):
            replace_file(path, json_bytes(lasting), durable=False)  # a reboot ends every claim
        return lasting

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the claims for a short read and write."""
        with storing(f"cannot use {self.folder}"):
            make_private(self.folder)
            lock = locked(self.folder / "lock")
        with lock:
            yield


@contextmanager
def claiming(state: StateDir, model: str, by: str) -> Iterator[None]:
    """Claim `model` during the block. Raises DeployUnderWay if another deployment has the model."""
    claims = Claims(state, read_config(state).device)
    token = claims.acquire(model, by, CLAIMING_S).token
    try:
        with under_claim(state, token):
            yield
    finally:
        with contextlib.suppress(StorageFailed):  # the claim expires by itself
            claims.release(token)


@contextmanager
def under_claim(state: StateDir, token: str) -> Iterator[None]:
    """Renew the claim `token` during the block, because an engine may compile for many minutes.

    Without a token (""), do nothing. Raises DeployUnderWay if another deployment replaced the claim.
    """
    if not token:
        yield
        return
    claims = Claims(state, read_config(state).device)
    ended = threading.Event()
    pause_s = claims.renew(token).lasts_s / 3

    def keep_renewing() -> None:
        while not ended.wait(pause_s):
            with contextlib.suppress(EdgeRTError):
                claims.renew(token)

    thread = threading.Thread(target=keep_renewing, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
