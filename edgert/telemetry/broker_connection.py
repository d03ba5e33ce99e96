"""The state of the forwarder's connection, in a file beside the spool for `edgertd status`."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file
from edgert.typed_json import json_bytes, read_json

CONNECTED, REFUSED, STOPPED = "connected", "refused", "stopped"
_NAME = "connection.json"


@dataclass(frozen=True)
class BrokerConnection:
    """The connection to the broker. `state` is "" before the first attempt; `at` is seconds since 1970."""

    state: str = ""
    text: str = ""
    at: int = 0


def write_broker_connection(folder: Path, state: str, text: str) -> None:
    """Store `state` (CONNECTED, REFUSED, STOPPED or an error's code) and its text if the disk has space."""
    with contextlib.suppress(OSError):
        replace_file(folder / _NAME, json_bytes(BrokerConnection(state, text, int(time.time()))), durable=False)


def read_broker_connection(folder: Path) -> BrokerConnection:
    """Return the state of the connection that the forwarder last stored."""
    connection = read_json(BrokerConnection, folder / _NAME)
    if connection is None or not connection.at:  # each stored state has a time: without a time, the file is damaged
        return BrokerConnection()
    return connection
