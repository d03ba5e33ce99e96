"""A follower that a test drives in place of the daemon's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgert.config import read_config
from edgert.errors import EdgeRTError
from edgert.follow.follower import ChannelFollower
from edgert.follow.pace import Pace
from edgert.follow.set_up import open_registry
from edgert.registry.address import parse_repository
from edgert.registry.client import Registry
from edgert.registry.connection import Connection
from edgert.versions.latest_time import LatestTime
from tests.support.devices import Device


class Events(list[tuple[str, str | None, dict[str, str | int]]]):
    """The events that a follower reported: name, model, fields."""

    def __call__(self, event: str, model: str | None, fields: dict[str, str | int]) -> None:
        self.append((event, model, fields))

    @property
    def names(self) -> list[str]:
        return [event for event, _, _ in self]


def following(
    device: Device,
    address: str = "",
    events: Events | None = None,
    *,
    now_s: float | None = None,
    answer_s: float | None = None,
    jitter: Callable[[], float] = lambda: 0.0,
    home: Path | None = None,
) -> ChannelFollower:
    """Return a follower of the device's configured channel: `stable` at `address`, if none yet.

    `now_s` is the time of its clock, which follows no time source. `answer_s` is the time limit of a small answer, and
    `home` is the folder with its runtimes.
    """
    if "[follow]" not in device.state.config.read_text():
        with device.state.config.open("a") as file:
            file.write(f'[follow]\nregistry = "{address}"\n')
    config = read_config(device.state)
    registry = open_registry(config)
    if answer_s is not None:
        registry = Registry(parse_repository(address), connection=Connection(answer_s=answer_s))
    latest = None if now_s is None else LatestTime(device.state, lambda: now_s, lambda: False)
    told = Events() if events is None else events
    return ChannelFollower(device.state, config, registry, told, Pace(config.follow), latest, jitter, home)


def followed(follower: ChannelFollower) -> list[str]:
    """Run one round, and return the text of each step. Raises the round's first error."""
    done = follower.round()
    if done.failure is not None:
        raise done.failure
    return [step.text for step in done.steps]


def failure_of(follower: ChannelFollower) -> EdgeRTError:
    """Run one round that fails, and return its error."""
    failure = follower.round().failure
    assert failure is not None, "the round failed"
    return failure
