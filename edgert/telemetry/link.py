"""How the forwarder's connection stands, kept beside the spool: written when it changes, read by `edgertd status`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file

CONNECTED = "connected"
_NAME = "link.json"


def write_link(folder: Path, state: str, said: str) -> None:
    """`state` is CONNECTED, "stopped" or an error's code. A disk that is full costs the note, never the forwarder."""
    value = {"state": state, "said": said, "at": int(time.time())}
    with contextlib.suppress(OSError):
        replace_file(folder / _NAME, json.dumps(value).encode(), durable=False)


@dataclass(frozen=True)
class Link:
    """The connection to the broker. `state` is "" before the first attempt; `at` is seconds since 1970."""

    state: str = ""
    said: str = ""
    at: int = 0


def read_link(folder: Path) -> Link:
    """Return what the forwarder noted last."""
    try:
        value = json.loads((folder / _NAME).read_text())
        return Link(str(value["state"]), str(value["said"]), int(value["at"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Link()
