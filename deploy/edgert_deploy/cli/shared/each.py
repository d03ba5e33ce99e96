"""The same work on several devices, side by side: a failure delays no other, Ctrl-C ends all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import click

from edgert.cli.output import emit
from edgert.errors import EdgeRTError, EngineMissing, HealthCheckFailed, Interrupted, RolledBack, exit_code_of
from edgert_deploy.cli.shared.output import error_lines
from edgert_deploy.common.parallel import Stop, for_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import Transport, open_transport

FIRST = "stopping: devices in progress finish, others are left as they are (Ctrl-C again detaches)"
SECOND = "detached: devices in progress finish or roll back on their own"
# Another device would fail in the same way.
_TELLING = (RolledBack, HealthCheckFailed, EngineMissing)

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The results of the work: a row for each device, those that failed with `error`, and their errors."""

    rows: list[Row]
    errors: list[EdgeRTError]

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if "error" not in row]

    def show(
        self, text: str, as_json: bool, *, below: str = "", code: int = 0, raise_lone: bool = True, **also: Any
    ) -> None:
        """Print JSON, or `text`, errors and `below`; exit with the errors' code, without any with `code`.

        `also` is added to the JSON. The error of a lone device is raised as it is, unless `raise_lone` is false.
        """
        if raise_lone and self.errors and len(self.rows) == 1:
            raise self.errors[0]
        failed = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in self.rows if "error" in row]
        shown = "\n".join(part for part in (text, error_lines(failed).rstrip("\n"), below) if part)
        emit({"ok": not self.errors, **also, "devices": self.rows}, shown, as_json)
        click.get_current_context().exit(exit_code_of(self.errors) or code)


def run_on_each(
    devices: Sequence[Device], work: Callable[[Device, Transport], Row], *, one_first: bool = False
) -> Results:
    """Do `work`, which returns a JSON object, on each device; return rows in the order of `devices`.

    With `one_first`, the others wait until it has gone well on one. If that one shows that it cannot, they are left
    alone.
    """
    answers = _answers(devices, work, one_first)
    rows = [
        {"device": device.name, **({"error": row.as_json()} if isinstance(row, EdgeRTError) else row)}
        for device, row in zip(devices, answers, strict=True)
    ]
    return Results(rows, [answer for answer in answers if isinstance(answer, EdgeRTError)])


def _answers(
    devices: Sequence[Device], work: Callable[[Device, Transport], Row], one_first: bool
) -> list[Row | EdgeRTError]:
    stop = Stop()
    answers: list[Row | EdgeRTError | None] = []

    def one(device: Device) -> Row | EdgeRTError:
        if stop.asked:
            return Interrupted(f"{device.name}: interrupted before it began: left as it is")
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
            if isinstance(answer, _TELLING):
                name = devices[len(answers) - 1].name
                left = devices[len(answers) :]
                answers += [type(answer)(f"{device.name}: left as it is, since it failed on {name}") for device in left]
            proven = not isinstance(answer, EdgeRTError)
        answers += for_each(devices[len(answers) :], one, stop)
    return [Interrupted("detached in the middle: check with edgert status") if a is None else a for a in answers]
