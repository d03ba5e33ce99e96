"""One piece of work on each of several devices, side by side: who fails holds up nobody, and Ctrl-C ends it in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from edgert.errors import EdgeRTError, EngineMissing, HealthCheckFailed, Interrupted, RolledBack
from edgert_deploy.common.parallel import Stop, for_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import Transport, open_transport

FIRST = "stopping: devices under way are brought to their end, others are left as they are (Ctrl-C again lets go)"
SECOND = "let go; devices under way decide for themselves"
# What another device would answer in the same way.
_TELLING = (RolledBack, HealthCheckFailed, EngineMissing)

Answer = TypeVar("Answer")


def on_each(
    devices: Sequence[Device], work: Callable[[Device, Transport], Answer], *, one_first: bool = False
) -> list[Answer | EdgeRTError]:
    """`work` over each device's own link; its answer or its error, in the order of `devices`.

    With `one_first`, the others wait until it has gone well on one, and are left alone where it showed that it cannot.
    """
    stop = Stop()
    answers: list[Answer | EdgeRTError | None] = []

    def one(device: Device) -> Answer | EdgeRTError:
        if stop.asked:
            return Interrupted(f"{device.name}: interrupted before it was begun: left as it is")
        transport = open_transport(device)
        try:
            return work(device, transport)
        except EdgeRTError as error:
            return error
        finally:
            transport.close()

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
    return [Interrupted("let go in the middle: look with edgert status") if a is None else a for a in answers]
