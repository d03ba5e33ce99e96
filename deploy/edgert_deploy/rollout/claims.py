"""A deployment's claim on a model of a device, seen from the host (on the device: `edgert.versions.claims`).

The token is also noted on this host (`claim_note`). Whoever sets the device up, or has it try a new runtime, is not
disturbed either: the claim is taken first, then looked whether that is so, and a bootstrap does it the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgert.checks.status import DeviceStatus
from edgert.errors import EdgeRTError
from edgert.versions.claims import LASTS_S_MAX
from edgert_deploy.devices.claim_notes import SLOW_LINK_BYTES_PER_S, noted, read_note, who, write_note
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.setup_claim import check_not_set_up

LASTS_S = 60.0  # commands on the device renew it while they run: this is for what lies between them


@dataclass(frozen=True)
class HeldClaim:
    """`facts` are the device's under the claim."""

    token: str
    facts: DeviceStatus


@contextmanager
def claimed(
    daemon: RemoteDaemon, model: str, send_bytes: int = 0, bytes_per_s: float = SLOW_LINK_BYTES_PER_S
) -> Iterator[HeldClaim]:
    """Hold `model` on the device against every other deployment. Raises DeployUnderWay where another has it, and where
    the device is being set up.

    What is sent meanwhile may take as long as a slow link needs for it, or one that is limited to `bytes_per_s`.
    """
    lasts_s = min(LASTS_S + send_bytes / min(bytes_per_s, SLOW_LINK_BYTES_PER_S), LASTS_S_MAX)
    with noted(daemon.device, model, f"another deploy of {model}") as note:
        old = read_note(note)
        instead = ("--instead-of", old) if old.startswith(f"{model}.") else ()
        answer = daemon.call("claim", model, "--by", who(), "--for-s", f"{lasts_s:.0f}", *instead)
        token = str(answer["token"])
        write_note(note, token)
        try:
            check_not_set_up(daemon.device, daemon.transport)
            yield HeldClaim(token, DeviceStatus.from_json(answer["status"]))
        finally:
            with contextlib.suppress(EdgeRTError):  # a link that is down: it runs out there, and is noted here
                daemon.call("release", token)
                write_note(note, "")
