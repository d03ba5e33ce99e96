"""Calls `edgertd` on a device over a transport, and raises its errors with the same class."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

from edgert.checks.status import DeviceStatus
from edgert.errors import (
    USAGE_CODE,
    DaemonUnreachable,
    DeviceError,
    EdgeRTError,
    NotBootstrapped,
    RuntimeBroken,
    by_code,
)
from edgert.typed_json import Mistyped, from_json
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import LineSink, Result, Transport

QUICK_S_MAX = 60.0
INSTALL_S_MAX = 3600.0  # this limit is long, because an engine may compile a new model for many minutes
ACTIVATE_S_MAX = 900.0
CHECK_S_MAX = 180.0

T = TypeVar("T")

_COMMAND_NOT_FOUND = (126, 127)
SIGNALLED = 128  # if a signal ended the command, a shell's exit code is this number plus the signal's number


class DaemonCrashed(DeviceError):
    """A signal ended `edgertd` before it answered, for example because an engine crashed."""


class RemoteDaemon:
    """The commands of `edgertd` on one device. `progress` receives their lines on stderr."""

    def __init__(self, transport: Transport, device: Device, progress: LineSink | None = None) -> None:
        self.transport, self.device, self._progress = transport, device, progress

    def status(self) -> DeviceStatus:
        return answer_of(DeviceStatus, self.call("status"))

    def named(self, status: DeviceStatus) -> DeviceStatus:
        """Return `status` with the inventory's name of the device, because a renamed one reports its old name."""
        return replace(status, device=self.device.name)

    def call(self, *words: str, timeout_s: float = QUICK_S_MAX) -> dict[str, Any]:
        """Return the JSON of `edgertd WORDS --json`.

        Raises the error that `edgertd` reports, NotBootstrapped, RuntimeBroken, and the errors of the transport.
        """
        argv = edgertd(self.device)

        def progress(line: str) -> None:
            # On a device without edgertd, the shell prints an error with the path of the program. TFLite prints lines
            # that start with INFO.
            if self._progress is not None and argv[0] not in line and not line.startswith("INFO: "):
                self._progress(line)

        result = self.transport.run([*argv, *words, "--json"], timeout_s, on_stderr=progress)
        value = _object(result.stdout)
        if result.ok and value is not None:
            return value
        raise self._error(result, value)

    def _error(self, result: Result, value: dict[str, Any] | None) -> EdgeRTError:
        name = self.device.name
        advice = f"EdgeRT is not set up on {name}: edgert bootstrap {name}"
        if result.exit_code in _COMMAND_NOT_FOUND or "No module named 'edgert" in result.stderr:
            venv = f"{self.device.home}/venv"
            if self.device.kind.needs_runtime and self.transport.run(["test", "-L", venv], QUICK_S_MAX).ok:
                return RuntimeBroken(
                    f"EdgeRT is installed on {name}, but the Python of {venv} does not start: it was removed or replaced. A "
                    "daemon that runs still serves, but would not start again. Install that Python again, or make a new "
                    f"environment with: edgert bootstrap {name}"
                )
            return NotBootstrapped(advice)
        reported = value.get("error") if value is not None else None
        if not isinstance(reported, dict) or "code" not in reported:
            signalled = result.exit_code < 0 or result.exit_code > SIGNALLED
            return (DaemonCrashed if signalled else DeviceError)(f"{name}: {result.failure_text()}")
        message = str(reported.get("message", ""))
        sentence = message.removesuffix(".")  # the messages of click end with a full stop
        if reported["code"] == NotBootstrapped.code:
            return NotBootstrapped(advice)
        if reported["code"] == USAGE_CODE:
            return DeviceError(
                f"{name}: its edgertd refuses a command of this host's edgert: {sentence}. It has another version of edgert: "
                f"upgrade it with edgert bootstrap {name} --upgrade"
            )
        if reported["code"] == DaemonUnreachable.code:  # the advice in `message` is for a shell on the device
            return DaemonUnreachable(
                f"{name}: {sentence}. On this host, edgert logs {name} shows why, and edgert bootstrap {name} starts a "
                "stopped daemon"
            )
        cls = by_code(str(reported["code"]))
        if cls is EdgeRTError and reported["code"] != EdgeRTError.code:  # it has no class in this version of edgert
            cls = DeviceError
        return cls(f"{name}: {message}")


def answer_of(cls: type[T], value: Any) -> T:
    """Return an answer of `edgertd` as the dataclass `cls`. Raises DeviceError if the answer does not fit."""
    try:
        return from_json(cls, value)
    except Mistyped as error:
        raise DeviceError(
            f"the device's answer cannot be read: {error}. The device has another version of edgert: "
            "bootstrap it again from this host"
        ) from error


def edgertd(device: Device) -> list[str]:
    """Return the words that run `edgertd` on `device`."""
    program = [f"{device.home}/venv/bin/edgertd"] if device.kind.needs_runtime else [device.python, "-m", "edgert.cli"]
    return [*program, "--state", device.state]


def script_path(device: Device) -> str:
    """Return the path of the script on the device that changes the device's runtime."""
    return f"{device.home}/runtime.sh"


def _object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object that is a line of `text`; None if no line is a JSON object."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None
