"""The doctor: every precondition of this host and of each device looked at, with what mends it beside it.

Nothing is changed. A check that cannot be made is a finding as well, and holds up no other.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"
HOST = "host"


@dataclass(frozen=True)
class Finding:
    """What one check found `where` ("host" or a device's name). `mend` is the next command or step; "" where all is well.

    `exit_code` is what `edgert doctor` ends with where this is the first that failed.
    """

    where: str
    check: str
    level: str
    says: str
    mend: str = ""
    exit_code: int = 0
