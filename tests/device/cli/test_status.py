"""`edgertd status` for people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.cli.status import _text
from tests.support.statuses import device_status


@pytest.mark.parametrize(
    ("engines", "line"),
    [({"null": "1", "fault": "1", "tflite": "2.3.0"}, "tflite 2.3.0"), ({"null": "1", "fault": "1"}, "none")],
)
def test_engines_for_tests_are_not_shown(engines: dict[str, str], line: str) -> None:
    assert f"engines  {line}" in _text(replace(device_status(), engines=engines)).splitlines()
