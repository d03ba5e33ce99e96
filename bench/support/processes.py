"""Processor time, memory and cores of processes, as the kernel counts them."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def pin(pids: Sequence[int], cores: set[int] | None) -> None:
    """Pin every thread of the processes to `cores`, or to all cores if None."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores or set(range(os.cpu_count() or 1)))


def own_mb(pid: int) -> float:
    """Return a process's private memory (RssAnon) in MB, which no other process changes, unlike PSS."""
    return _status_kb(pid, "RssAnon") * 1024 / 1e6


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process (VmRSS) in MiB."""
    return _status_kb(pid, "VmRSS") / 1024


def cpu_us(pids: Sequence[int]) -> float:
    """Return the processor time of the processes so far, without those that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e6 / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """Return the processor time of all ended descendants: a busy machine changes it less than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processes(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def _status_kb(pid: int, field: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split(f"{field}:")[1].split()[0])
