"""The followed channel and its last round, as a type; stored in STATE/follow/note.json.

The daemon reads the file for the alarm `channel_stale`, and `edgertd status` shows its content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgert.config import DeviceConfig
from edgert.durable import replace_file
from edgert.protocol.control import ask
from edgert.state_dir import StateDir
from edgert.typed_json import json_bytes, read_json, to_json

STALE = "channel_stale"  # the name of the alarm
AGAIN = 75  # the exit code of a round that could not finish: another round should start soon (EX_TEMPFAIL)


@dataclass(frozen=True)
class WantedRelease:
    """A release that the channel wants on this device."""

    release: int
    digest: str


@dataclass(frozen=True)
class ChannelStatus:
    """The channel that the device follows, and the result of the follower's last round.

    Attributes:
        registry: The address of the registry; "" if the device follows no channel.
        counter: The counter of the newest stored statement.
        expires: The expiry of the newest stored statement.
        asked_at: The time of the registry's last answer, in seconds since 1970; 0 before the first answer.
        begun_at: The start of the first round, in seconds since 1970.
        error: The reason why the last request failed; "" if it succeeded.
        stale: The reason of the alarm channel_stale; "" if the alarm is not raised.
        steps: The result for each model, as text.
        wanted: The channel's release of each model, unless a later deployment made another release live.
    """

    registry: str = ""
    channel: str = ""
    counter: int = 0
    expires: str = ""
    asked_at: int = 0
    begun_at: int = 0
    error: str = ""
    stale: str = ""
    steps: tuple[str, ...] = ()
    wanted: Mapping[str, WantedRelease] = field(default_factory=dict)


@dataclass(frozen=True)
class ChannelEvent:
    """A telemetry event that the follower, or a rollback by a command, reports through the daemon.

    `model` is None for an event of the device.
    """

    event: str
    model: str | None = None
    release: int | None = None
    code: str | None = None
    reason: str | None = None
    alarm: str | None = None
    value: float | None = None
    limit: float | None = None


def send_event(state: StateDir, event: ChannelEvent) -> None:
    """Send the event to the daemon, which reports it. Raises EdgeRTError if no daemon answers."""
    ask(state.control_socket, {"op": "event", **to_json(event)})


def read_channel_status(state: StateDir, config: DeviceConfig) -> ChannelStatus:
    """Return the status that the follower last stored for the configured channel, else an empty status."""
    follow = config.follow
    if not follow.registry:
        return ChannelStatus()
    status = read_json(ChannelStatus, _path(state))
    if status is not None and (status.registry, status.channel) == (follow.registry, follow.channel):
        return status
    return ChannelStatus(follow.registry, follow.channel)


def write_channel_status(state: StateDir, status: ChannelStatus) -> None:
    """Replace the stored status. If the write fails, only the status is lost."""
    with contextlib.suppress(OSError):
        replace_file(_path(state), json_bytes(status), durable=False)


def _path(state: StateDir) -> Path:
    return state.follow / "note.json"
