"""The same work on several devices at a time. A failure on one device does not delay the others.

After Ctrl-C, the work does not start on further devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from edgert.cli.output import emit
from edgert.errors import EdgeRTError, EngineMissing, HealthCheckFailed, Interrupted, RolledBack, exit_code_of
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.output import error_lines
from edgert_deploy.common.parallel import UserStop, for_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import Transport, open_transport

FIRST = "stopping: devices in progress finish, other devices do not change (Ctrl-C again detaches)"
SECOND = "detached: devices in progress finish or roll back on their own"
# If one device fails with one of these errors, the other devices would fail in the same way.
_FAILS_EVERYWHERE = (RolledBack, HealthCheckFailed, EngineMissing)

T = TypeVar("T")  # the work's result: a dataclass or a dict that `to_json` accepts


@dataclass(frozen=True)
class Results(Generic[T]):
    """The name of each device with its answer or error, in the order of the devices."""

    answers: list[tuple[str, T | EdgeRTError]]

    @property
    def good(self) -> list[tuple[str, T]]:
        return [(name, answer) for name, answer in self.answers if not isinstance(answer, EdgeRTError)]

    @property
    def failed(self) -> list[tuple[str, EdgeRTError]]:
        return [(name, answer) for name, answer in self.answers if isinstance(answer, EdgeRTError)]

    def show(
        self,
        text: str,
        as_json: bool,
        *,
        below: str = "",
        code: int = 0,
        raise_lone: bool = True,
        failed_also: Mapping[str, Any] | None = None,
        **also: Any,
    ) -> None:
        """Print JSON, or else `text`, the errors and `below`. Exit with the errors' code, else `code`.

        Args:
            below: Further lines below the errors.
            code: The exit code if no device failed.
            raise_lone: Whether to raise the error unchanged if there is only one device.
            failed_also: Further keys in the JSON of each device that failed.
            also: Further keys in the JSON.
        """
        errors = [error for _, error in self.failed]
        if raise_lone and errors and len(self.answers) == 1:
            raise errors[0]
        lines = error_lines([(name, error.code, error.message) for name, error in self.failed]).rstrip("\n")
        shown = "\n".join(part for part in (text, lines, below) if part)
        devices = [
            {"device": name, "error": answer.as_json(), **(failed_also or {})}
            if isinstance(answer, EdgeRTError)
            else {"device": name, **to_json(answer)}
            for name, answer in self.answers
        ]
        emit({"ok": not errors, **also, "devices": devices}, shown, as_json)
        click.get_current_context().exit(exit_code_of(errors) or code)


def run_on_each(
    devices: Sequence[Device], work: Callable[[Device, Transport], T], *, one_first: bool = False
) -> Results[T]:
    """Do `work` on each device; return its answers in the order of `devices`.

    With `one_first`, the other devices wait until the work succeeds on one device. If a device fails with an error of
    `_FAILS_EVERYWHERE` before that, the command does not change the remaining devices.
    """
    answers = _answers(devices, work, one_first)
    return Results([(device.name, answer) for device, answer in zip(devices, answers, strict=True)])


def _answers(
    devices: Sequence[Device], work: Callable[[Device, Transport], T], one_first: bool
) -> list[T | EdgeRTError]:
    stop = UserStop()
    answers: list[T | EdgeRTError | None] = []

    def one(device: Device) -> T | EdgeRTError:
        if stop.asked:
            return Interrupted(f"{device.name}: interrupted before the work began: this device did not change")
        with closing(open_transport(device)) as transport:
            try:
                return work(device, transport)
            except EdgeRTError as error:
                return error

    with stop.on_interrupt(FIRST, SECOND):
        proven = not one_first
        while not proven and len(answers) < len(devices):
            (answer,) = for_each(devices[len(answers) : len(answers) + 1], one, stop)
            answers.append(answer)
            if isinstance(answer, _FAILS_EVERYWHERE):
                name = devices[len(answers) - 1].name
                left = devices[len(answers) :]
                answers += [
                    type(answer)(f"{device.name}: not changed, because the same work failed on {name}")
                    for device in left
                ]
            proven = not isinstance(answer, EdgeRTError)
        answers += for_each(devices[len(answers) :], one, stop)
    return [Interrupted("detached before the end: check with edgert status") if a is None else a for a in answers]
