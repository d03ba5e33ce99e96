"""The state of the forwarder's connection, in a file beside the spool: written on changes, read by `edgertd status`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file

CONNECTED, STOPPED = "connected", "stopped"
_NAME = "link.json"


def write_link(folder: Path, state: str, text: str) -> None:
    """Keep `state` (CONNECTED, STOPPED or an error's code) and a text about it. A full disk costs only the note."""
    value = {"state": state, "text": text, "at": int(time.time())}
    with contextlib.suppress(OSError):
        replace_file(folder / _NAME, json.dumps(value).encode(), durable=False)


@dataclass(frozen=True)
class Link:
    """The connection to the broker. `state` is "" before the first attempt; `at` is seconds since 1970."""

    state: str = ""
    text: str = ""
    at: int = 0


def read_link(folder: Path) -> Link:
    """Return the last note of the forwarder."""
    try:
        value = json.loads((folder / _NAME).read_text())
        return Link(str(value["state"]), str(value["text"]), int(value["at"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Link()
