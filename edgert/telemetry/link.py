"""How the forwarder's connection stands, kept beside the spool: written when it changes, read by `edgertd status`."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from edgert.durable import replace_file

CONNECTED = "connected"
_NAME = "link.json"


def write_link(folder: Path, state: str, said: str) -> None:
    """`state` is CONNECTED, "stopped" or an error's code. A disk that is full costs the note, never the forwarder."""
    value = {"state": state, "said": said, "at": int(time.time())}
    with contextlib.suppress(OSError):
        replace_file(folder / _NAME, json.dumps(value).encode(), durable=False)


def read_link(folder: Path) -> dict[str, Any]:
    """{"state", "said", "at"}; state "" where nothing was written yet."""
    try:
        value = json.loads((folder / _NAME).read_text())
        return {"state": str(value["state"]), "said": str(value["said"]), "at": int(value["at"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"state": "", "said": "", "at": 0}
