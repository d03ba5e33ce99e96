"""The command of the forwarder's process."""

from __future__ import annotations

import os
import sys

from edgert.config import DeviceConfig, StateDir


def forwarder_command(state: StateDir, config: DeviceConfig, boot: str) -> list[str]:
    return [sys.executable, "-m", "edgert.telemetry.forwarder", "--state", os.fspath(state.root), "--boot", boot]
