"""The followed channel and its last round, as a type; kept in STATE/follow/note.json.

The daemon reads it for the alarm `channel_stale`, and `edgertd status` shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgert.config import DeviceConfig
from edgert.durable import replace_file
from edgert.state_dir import StateDir
from edgert.typed_json import json_bytes, read_json

STALE = "channel_stale"  # the alarm
AGAIN = 75  # the exit code of a round that waits for something: begin another one soon (EX_TEMPFAIL)


@dataclass(frozen=True)
class WantedRelease:
    """A release that the channel wants on this device."""

    release: int
    digest: str


@dataclass(frozen=True)
class ChannelStatus:
    """The channel that the device follows ("": none), and what the follower last did.

    `counter` and `expires` are those of the newest statement that it kept. `asked_at` is when the registry last
    answered (0: never yet), `begun_at` when the first round began, in seconds since 1970. `error` says why the last
    question failed, `stale` why the alarm channel_stale is raised ("": it is not), `steps` the result for each model.
    `wanted` has the release that the channel wants of each model, unless a deployment made another one live after it.
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
    """An event of the follower on its way through the daemon: about `model`, or about the device."""

    event: str
    model: str | None = None
    release: int | None = None
    code: str | None = None
    reason: str | None = None
    alarm: str | None = None
    value: float | None = None
    limit: float | None = None


def read_channel_status(state: StateDir, config: DeviceConfig) -> ChannelStatus:
    """Return what the follower last kept; an empty status if it kept nothing of the configured channel."""
    follow = config.follow
    if not follow.registry:
        return ChannelStatus()
    status = read_json(ChannelStatus, _path(state))
    if status is not None and (status.registry, status.channel) == (follow.registry, follow.channel):
        return status
    return ChannelStatus(follow.registry, follow.channel)


def write_channel_status(state: StateDir, status: ChannelStatus) -> None:
    """Replace the kept status. A full disk costs only the status."""
    with contextlib.suppress(OSError):
        replace_file(_path(state), json_bytes(status), durable=False)


def _path(state: StateDir) -> Path:
    return state.follow / "note.json"
