"""The doctor checks every precondition on this host and on devices, and gives the next step.

The doctor changes nothing. If a check cannot run, this is a finding too, and the other checks continue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OK, WARN, FAIL = "ok", "warn", "fail"
HOST = "host"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        where: "host", or the name of a device.
        level: OK, WARN or FAIL.
        next_step: The command or action that repairs a fault; "" if there is no fault.
        exit_code: The exit code of a failure; `edgert doctor` exits with the code of the first failure.
    """

    where: str
    check: str
    level: str
    text: str
    next_step: str = ""
    exit_code: int = 0


@dataclass
class Report:
    """The findings on `where` so far. `exit_code` is the exit code of a failure that gives no other code."""

    where: str
    exit_code: int
    found: list[Finding] = field(default_factory=list)

    def ok(self, check: str, text: str) -> None:
        self.found.append(Finding(self.where, check, OK, text))

    def graded(self, check: str, text: str, next_step: str, *, fails: bool, warns: bool) -> None:
        """Record a failure if `fails`, else a warning if `warns`, else a success."""
        if fails:
            self.fail(check, text, next_step)
        elif warns:
            self.warn(check, text, next_step)
        else:
            self.ok(check, text)

    def warn(self, check: str, text: str, next_step: str) -> None:
        self.found.append(Finding(self.where, check, WARN, text, next_step))

    def fail(self, check: str, text: str, next_step: str, exit_code: int = 0) -> None:
        self.found.append(Finding(self.where, check, FAIL, text, next_step, exit_code or self.exit_code))
