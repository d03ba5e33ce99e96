"""Machines as `edgert device probe` finds them."""

from __future__ import annotations

from edgert_deploy.devices.facts import MachineFacts

PI_4 = MachineFacts(
    machine="aarch64",
    python="3.11",
    python_path="/usr/bin/python3",
    glibc="2.36",
    memory_mb=3794,
    uid=1000,
    home="/home/pi",
    model="Raspberry Pi 4 Model B Rev 1.5",
    systemd=True,
)
