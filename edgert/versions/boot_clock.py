"""The clock of trials and claims: seconds since this boot, which a reboot makes invalid."""

from __future__ import annotations

import os
import time
from pathlib import Path

BOOT_ID_VARIABLE = "EDGERT_BOOT_ID"  # 32 hexadecimal digits, as systemd's %b gives them


class BootClock:
    """Seconds since this boot, suspend included, and the boot's id.

    Every process must see the same id. A container manager replaces the boot id in the container's /proc. In the
    container, a service with its own /proc would read the host's id instead. So the unit file passes the service
    manager's id to the service in BOOT_ID_VARIABLE.
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
        """Return the seconds until the time `ends_at_s` of the boot `boot_id`.

        Return 0 if this time has passed, if `boot_id` is another boot, or if `ends_at_s` is NaN.
        """
        left_s = ends_at_s - self.now_s()
        return left_s if boot_id == self.boot_id and left_s > 0 else 0.0
