"""Facts about the machine are read from files. If a file is missing or unreadable, the fact is None."""

from __future__ import annotations

import gc
import os
import platform
import resource
from pathlib import Path

import pytest

from edgert import machine


def test_the_temperature_is_that_of_the_hottest_zone_that_can_be_read(tmp_path: Path) -> None:
    assert machine.temp_c(tmp_path) is None
    for number, text in enumerate(("41250\n", "not a number", "55000\n")):
        (tmp_path / f"thermal_zone{number}").mkdir()
        (tmp_path / f"thermal_zone{number}" / "temp").write_text(text)
    assert machine.temp_c(tmp_path) == 55.0


def test_only_the_bits_about_the_present_mean_throttled(tmp_path: Path) -> None:
    path = tmp_path / "get_throttled"
    assert machine.throttled(path) is None
    for text, throttled in (("0", False), ("50000", False), ("50005", True)):  # the upper bits are about the past
        path.write_text(text)
        assert machine.throttled(path) is throttled


def test_the_fields_of_a_sys_message_are_those_of_this_machine(tmp_path: Path) -> None:
    fields = machine.sys_fields(tmp_path)
    assert isinstance(fields["cpus"], int)
    assert isinstance(fields["uptime_s"], float)
    for name in ("mem_available_bytes", "disk_free_bytes"):
        value = fields[name]
        assert isinstance(value, int)
        assert value > 0
    assert (machine.rss_bytes() or 0) > 2**20
    assert machine.disk_free_bytes(tmp_path / "missing") is None


def test_a_process_without_a_free_descriptor_reports_fewer_facts_and_continues(tmp_path: Path) -> None:
    """An unreadable fact once ended the thread that reports a worker's figures."""
    (tmp_path / "thermal_zone0").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        fields, temperature, size = machine.sys_fields(tmp_path), machine.temp_c(tmp_path), machine.rss_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (temperature, size, fields["mem_available_bytes"], fields["uptime_s"]) == (None, None, None, None)
    assert isinstance(fields["disk_free_bytes"], int)


def test_a_process_has_a_size_and_a_process_that_has_ended_has_none() -> None:
    size = machine.process_mb(os.getpid())
    assert size is not None
    assert 5 < size < 5000
    assert machine.process_mb(2**22 + 1) is None


@pytest.mark.parametrize(
    ("flags", "saturates"), [("avx2 fma", True), ("avx512f avx512_vnni", False), ("avx2 avx_vnni", False)]
)
def test_int8_saturates_on_x86_without_vnni(
    flags: str, saturates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : fpu {flags}\n")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert machine.int8_saturates(cpuinfo) == saturates
    assert machine.int8_saturates(tmp_path / "absent")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not machine.int8_saturates(cpuinfo)


def test_calls_of_the_c_library_leave_no_garbage() -> None:
    """The forwarder reads the clock in each window, and its garbage is rarely collected."""
    machine.clock_synced()
    machine.return_free_memory()
    gc.collect()
    machine.clock_synced()
    machine.return_free_memory()
    assert gc.collect() == 0
