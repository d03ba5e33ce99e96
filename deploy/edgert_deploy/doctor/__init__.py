"""The doctor: checks every precondition on this host and on devices, and names the next step.

It changes nothing. A check that cannot run is a finding too, and stops no other check.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"
HOST = "host"


@dataclass(frozen=True)
class Finding:
    """The result of one check on `where`, "host" or a device.

    `next_step` repairs a fault; it is "" without one.

    `exit_code` is that of `edgert doctor` if this is the first finding that failed.
    """

    where: str
    check: str
    level: str
    text: str
    next_step: str = ""
    exit_code: int = 0
