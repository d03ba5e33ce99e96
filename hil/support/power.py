"""Power switches: of a virtual device, or a command of the user that drives a relay."""

from __future__ import annotations

import subprocess
import time
from typing import Protocol

from edgert.errors import DeviceError

COMMAND_S_MAX = 60.0
OFF_S = 2.0  # until a board's capacitors are empty


class PowerSwitch(Protocol):
    """A switch that cuts the power without a warning to the device. Methods raise DeviceError on failure."""

    def on(self) -> None: ...

    def off(self) -> None: ...

    def cycle(self) -> None:
        """Switch off, wait, switch on."""
        ...


class CommandSwitch:
    """A relay behind a command such as `uhubctl -l 1-1 -p 2 -a {}`; {} stands for on or off."""

    def __init__(self, command: str) -> None:
        self._command = command

    def on(self) -> None:
        self._run("on")

    def off(self) -> None:
        self._run("off")

    def cycle(self) -> None:
        self.off()
        time.sleep(OFF_S)
        self.on()

    def _run(self, what: str) -> None:
        command = self._command.replace("{}", what)
        try:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=COMMAND_S_MAX)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"`{command}` took longer than {COMMAND_S_MAX:.0f} s") from error
        if done.returncode != 0:
            raise DeviceError(f"`{command}` ended with {done.returncode}: {done.stderr.strip()[-400:]}")
