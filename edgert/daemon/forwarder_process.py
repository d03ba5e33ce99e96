"""The forwarder as the supervisor starts it: its command, its settings in a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from edgert import __version__
from edgert.config import DeviceConfig, StateDir

# Under this name a service manager hands over the broker's password (systemd's LoadCredential).
PASSWORD_CREDENTIAL = "mqtt-password"


def forwarder_command(state: StateDir, config: DeviceConfig, boot: str) -> list[str]:
    """Write the forwarder's settings; the command that follows them."""
    path = state.spool.with_name("forwarder.json")
    path.write_text(json.dumps(_settings(state, config, boot)))
    return [sys.executable, "-m", "edgert.telemetry.forwarder", "--config", os.fspath(path)]


def _settings(state: StateDir, config: DeviceConfig, boot: str) -> dict[str, Any]:
    mqtt = {k: v for k, v in vars(config.mqtt).items() if v != ""}
    home_assistant = mqtt.pop("home_assistant", "")
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if credentials and (Path(credentials) / PASSWORD_CREDENTIAL).exists():
        mqtt["password_file"] = os.fspath(Path(credentials) / PASSWORD_CREDENTIAL)
    return {
        "site": config.site,
        "device": config.device,
        "boot": boot,
        "spool": os.fspath(state.spool),
        "info": {"edgert": __version__, "profile": config.profile, "machine": config.machine},
        "mqtt": mqtt,
        "home_assistant": home_assistant,
        "sys_interval_s": config.serving.window_s,
    }
