"""The set-up of a follower by its configuration: the registry, and the reporter of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgert.checks.channel_status import ChannelEvent, send_event
from edgert.config import LOGIN_CREDENTIAL, DeviceConfig, credential
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.follow.follower import Report
from edgert.log import log
from edgert.names import CHANNEL_NAME
from edgert.registry.address import parse_repository
from edgert.registry.client import Registry
from edgert.registry.login import read_credentials
from edgert.state_dir import StateDir


def reporter(state: StateDir) -> Report:
    """Return a `Report` that sends events to the daemon for the spool. Without a daemon, events are lost."""

    def report(event: str, model: str | None, fields: dict[str, Any]) -> None:
        try:
            send_event(state, ChannelEvent(event, model, **fields))
        except EdgeRTError as error:
            log(f"telemetry: the event {event} is lost: {error.message}")

    return report


def check_follows(config: DeviceConfig) -> None:
    """Raise ConfigInvalid if the device follows no channel."""
    if not config.follow.registry:
        raise ConfigInvalid(
            "this device follows no channel: set [follow] registry, or run edgert bootstrap --follow oci://HOST/REPOSITORY"
        )


def open_registry(config: DeviceConfig) -> Registry:
    """Return the registry that `[follow]` names. Raises ConfigInvalid."""
    follow = config.follow
    check_follows(config)
    if not CHANNEL_NAME.fullmatch(follow.channel):
        raise ConfigInvalid(f"[follow] channel is {follow.channel[:80]!r}: give a letter, then at most 39 of a-z 0-9 -")
    repository = parse_repository(follow.registry)
    login = credential(LOGIN_CREDENTIAL, follow.credentials)
    credentials = read_credentials(Path(login) if login else None, repository.host)
    return Registry(repository, credentials, Path(follow.ca) if follow.ca else None)
