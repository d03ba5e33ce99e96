"""Failures of many devices are grouped by their cause."""

from __future__ import annotations

from edgert_deploy.cli.shared.output import errors_by_cause


def test_messages_that_differ_only_in_names_and_addresses_and_numbers_have_one_cause() -> None:
    errors = [
        *(
            (f"nuc-{n}", "device.unreachable", f"nuc-{n} (pi@10.0.0.{n}:22) cannot be reached: timed out")
            for n in range(9)
        ),
        *(
            (f"cam-{n}", "device.storage_failed", f"cam-{n} has {n} MB free; the deployment needs 70 MB")
            for n in range(2)
        ),
        ("lone", "device.unreachable", "lone: the link was lost"),
    ]
    lines = errors_by_cause(errors).splitlines()
    assert lines == [
        "9 devices [device.unreachable]: nuc-0 (pi@10.0.0.0:22) cannot be reached: timed out",
        "  nuc-0, nuc-1, nuc-2, nuc-3, nuc-4 and 4 more",
        "2 devices [device.storage_failed]: cam-0 has 0 MB free; the deployment needs 70 MB",
        "  cam-0, cam-1",
        "1 device [device.unreachable]: the link was lost",
        "  lone",
    ]


def test_a_thousand_failures_with_three_causes_are_grouped_by_cause() -> None:
    causes = ("no space on {}", "{} has another host key", "{} refuses the login")
    errors = [(f"d{n}", "device.error", causes[n % 3].format(f"d{n}")) for n in range(1000)]
    assert len(errors_by_cause(errors).splitlines()) == 6


def test_many_different_messages_of_one_code_are_one_cause() -> None:
    errors = [(f"d{n}", "device.error", f"d{n}: {chr(ord('a') + n % 26)} is damaged") for n in range(52)]
    assert errors_by_cause(errors).splitlines() == [
        "52 devices [device.error], with 26 different messages, such as: a is damaged",
        "  d0, d26, d1, d27, d2 and 47 more",
    ]
