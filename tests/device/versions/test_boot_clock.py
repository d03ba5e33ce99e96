"""The boot clock: an end time is valid only in its own boot."""

from __future__ import annotations

import math
import time

import pytest

from edgert.versions.boot_clock import BOOT_ID_VARIABLE, BootClock


def test_an_end_is_over_once_its_time_has_passed_or_the_device_was_restarted() -> None:
    clock = BootClock()
    now_s = clock.now_s()
    assert 5.0 < clock.left_s(clock.boot_id, now_s + 10) <= 10.0
    assert clock.left_s(clock.boot_id, now_s - 1) == 0.0
    assert clock.left_s("another boot", now_s + 10) == 0.0
    assert clock.left_s(clock.boot_id, math.nan) == 0.0
    assert now_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_service_manager_may_give_the_id_of_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOOT_ID_VARIABLE, "12345678-1234-1234-1234-123456789abc")
    assert BootClock().boot_id == "12345678123412341234123456789abc"
    monkeypatch.delenv(BOOT_ID_VARIABLE)
    assert "-" not in BootClock().boot_id
