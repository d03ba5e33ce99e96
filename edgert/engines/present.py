"""Which engines there are here, and of which version: remembered, as importing them takes seconds on a small device.

What is remembered holds for one Python, and until a package is installed or removed: then the time of its
folder of packages changes. Engines that are not there are looked for each time, which costs little.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from edgert.durable import replace_file
from edgert.engines import ENGINES, engine_by_name
from edgert.errors import EdgeRTError


def engine_versions(remembered: Path) -> dict[str, str | None]:
    """The version of each engine's SDK, None where it is missing. `remembered` is the file that this is kept in.

    An engine whose libraries broke meanwhile is still named; loading an artifact will say what is wrong.
    """
    python, known = _python(), dict[str, str]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        value = json.loads(remembered.read_bytes())
        if value["python"] == python:
            known = {str(name): str(version) for name, version in value["versions"].items()}
    found = {name: known.get(name) or _version(name) for name in ENGINES}
    there = {name: version for name, version in found.items() if version is not None}
    if there != known:
        with contextlib.suppress(OSError):  # a full disk: they are looked for again
            replace_file(remembered, json.dumps({"python": python, "versions": there}).encode(), shared=True)
    return found


def _version(name: str) -> str | None:
    try:
        return engine_by_name(name).version()
    except EdgeRTError:
        return None


def _python() -> list[list[str | int]]:
    """What tells this Python, and what is installed for it, from others."""
    told: list[list[str | int]] = [[sys.executable, sys.version]]
    for folder in sys.path:
        if not folder.endswith("-packages"):  # where the command was called, say
            continue
        with contextlib.suppress(OSError):
            told.append([folder, os.stat(folder).st_mtime_ns])
    return told
