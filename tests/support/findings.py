"""Reading the doctor's findings."""

from __future__ import annotations

from edgert_deploy.doctor import FAIL, OK, Finding


def levels(findings: list[Finding], check: str) -> list[str]:
    for finding in findings:
        assert (finding.next_step == "") == (finding.level == OK), finding
        assert (finding.exit_code == 0) == (finding.level != FAIL), finding
    return [finding.level for finding in findings if finding.check == check]


def text_of(findings: list[Finding], check: str) -> str:
    return " ".join(f"{finding.text} {finding.next_step}" for finding in findings if finding.check == check)
