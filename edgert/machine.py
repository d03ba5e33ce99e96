"""Facts about this Linux machine and its user: temperature, memory, load, disk, clock, home.

This module only reads files. A fact that cannot be read is None; for example, a virtual machine has no thermometer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.errors import ConfigInvalid

if TYPE_CHECKING:
    import ctypes

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
_TIMESYNCD_MARK = Path("/run/systemd/timesync/synchronized")  # systemd-timesyncd.service(8)
_TIMEX_BYTES = 512  # struct timex is 208 bytes on 64-bit Linux; zero bytes mean "read only"


def temp_c(root: Path = Path("/sys/class/thermal")) -> float | None:
    """Return the temperature of the hottest thermal zone."""
    zones: list[int | None] = []
    with contextlib.suppress(OSError):  # this process has no file descriptor left
        zones = [_number(zone / "temp") for zone in root.glob("thermal_zone*")]
    readings = [milli / 1000 for milli in zones if milli is not None]
    return round(max(readings), 1) if readings else None


def throttled(path: Path = Path("/sys/devices/platform/soc/soc:firmware/get_throttled")) -> bool | None:
    """Return whether a Raspberry Pi is throttled now (voltage, frequency, heat); None on other machines."""
    try:
        return bool(int(path.read_text(), 16) & 0xF)
    except (OSError, ValueError):
        return None


def int8_saturates(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether sums of INT8 products saturate here: on x86 without VNNI (docs/decisions/0033)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        return "vnni" not in cpuinfo.read_text()
    except OSError:  # not Linux: an exact answer is worth more than a fast answer
        return True


def in_home(path: str, advice: str) -> Path:
    """Return the full path of `path`, which starts with ~/. Raises ConfigInvalid without a home folder."""
    expanded = Path(os.path.expanduser(path))
    if expanded.is_absolute():
        return expanded
    why = f"$HOME is not set, and user {os.getuid()} has no account"
    if home := os.environ.get("HOME"):
        why = f"$HOME is {home!r}, which is not an absolute path"
    raise ConfigInvalid(f"this user has no home folder: {why}. {advice}")


def rss_bytes(process: int | str = "self") -> int | None:
    """Return the resident memory of this process, or of the process with the given id."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return None


def return_free_memory() -> None:
    """Return freed memory to the system: after the load of a 14 MB model, the C library keeps 24 MB."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc has no such function
        _c_library().malloc_trim(0)


def prefer_for_oom(score: int) -> None:
    """Let the kernel end this process before others when memory runs out; `score` is at most 1000."""
    with contextlib.suppress(OSError):  # some sandboxes refuse this
        Path("/proc/self/oom_score_adj").write_text(str(score))


def process_mb(pid: int) -> float | None:
    """Return the process's PSS in MB (10^6 bytes); its RSS on older kernels; None if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    resident = rss_bytes(pid)
    return None if resident is None else resident / 1e6


def mem_available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def uptime_s() -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(Path("/proc/uptime").read_text().split()[0])
    return None


def disk_free_bytes(path: Path) -> int | None:
    """Return the space for unprivileged processes on the file system of `path`."""
    with contextlib.suppress(OSError):
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize
    return None


def clock_synced() -> bool | None:
    """Return whether the kernel's clock follows a time source; None if this is unknown.

    A sandboxed service may not query the kernel (systemd's ProtectClock). Then the function reads a file of
    systemd-timesyncd.
    """
    state = -1
    with contextlib.suppress(OSError, AttributeError):
        state = _c_library().adjtimex(_timex_type()())
    if state >= 0:
        return bool(state != _TIME_ERROR)
    return True if _TIMESYNCD_MARK.exists() else None


def sys_fields(disk: Path) -> dict[str, object]:
    """Return the fields of the `sys` message; a field is None if its value is unknown."""
    load_1m, load_5m = _loads()
    return {
        "uptime_s": uptime_s(),
        "load_1m": load_1m,
        "load_5m": load_5m,
        "cpus": os.cpu_count(),
        "mem_available_bytes": mem_available_bytes(),
        "disk_free_bytes": disk_free_bytes(disk),
        "temp_c": temp_c(),
        "throttled": throttled(),
        "clock_synced": clock_synced(),
    }


def _loads() -> tuple[float | None, float | None]:
    with contextlib.suppress(OSError):
        load_1m, load_5m, _ = os.getloadavg()
        return round(load_1m, 2), round(load_5m, 2)
    return None, None


def _number(path: Path) -> int | None:
    # Reading some zones of a running board fails (EAGAIN, ENODATA).
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


# Both values are kept, because each new one is a class, which only the garbage collector frees, and it rarely runs.


@functools.cache
def _c_library() -> ctypes.CDLL:
    import ctypes  # here, because most commands need no function of the C library

    return ctypes.CDLL(None)


@functools.cache
def _timex_type() -> type[ctypes.Array[ctypes.c_char]]:
    import ctypes

    return ctypes.c_char * _TIMEX_BYTES
