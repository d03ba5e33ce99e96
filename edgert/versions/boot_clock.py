"""The clock of trials and claims: seconds since this boot, which a reboot makes invalid."""

from __future__ import annotations

import os
import time
from pathlib import Path

BOOT_ID_VARIABLE = "EDGERT_BOOT_ID"  # 32 hexadecimal digits, as systemd's %b gives them


class BootClock:
    """Seconds since this boot, suspend included, and the boot's identity.

    Every process must see the same identity. A service with its own /proc in a container would read the host's, so
    the unit file passes on the identity from its service manager.
    """

    def __init__(self) -> None:
        try:
            read = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            read = "unknown"
        self.boot_id = (os.environ.get(BOOT_ID_VARIABLE) or read).replace("-", "")

    def now_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def left_s(self, boot_id: str, ends_at_s: float) -> float:
        """Return the seconds until `ends_at_s` of the boot `boot_id`; 0 if past, after a reboot, for NaN."""
        left_s = ends_at_s - self.now_s()
        return left_s if boot_id == self.boot_id and left_s > 0 else 0.0
