"""The installed engines and their versions, stored in a file because imports take seconds.

A stored version is valid for one Python, until a package is installed or removed. Such a change is seen by the time
stamp of the folder of packages. Each call searches for missing engines again, because this search is fast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

from edgert.durable import make_private, replace_file
from edgert.engines import ENGINES, engine_by_name
from edgert.errors import EdgeRTError


def engine_versions(versions_file: Path) -> dict[str, str | None]:
    """Return the version of each engine's SDK, None for a missing SDK.

    `versions_file` stores the known versions. An engine whose libraries break later stays in the list: the load of an
    artifact then reports the fault.
    """
    python, known = _python(), dict[str, str]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        value = json.loads(versions_file.read_bytes())
        if value["python"] == python:
            known = {str(name): str(version) for name, version in value["versions"].items()}
    versions = {name: known.get(name) or _version(name) for name in ENGINES}
    installed = {name: version for name, version in versions.items() if version is not None}
    if installed != known:
        with contextlib.suppress(OSError):  # on a full disk, the next call searches again
            make_private(versions_file.parent)  # a host requests the status before a daemon has run
            replace_file(versions_file, json.dumps({"python": python, "versions": installed}).encode(), shared=True)
    return versions


def _version(name: str) -> str | None:
    """Return the version of an engine's SDK; None if the SDK is missing or broken."""
    # An engine's module imports NumPy, which takes 0.1 s; do this only for an installed SDK.
    if (packages := ENGINES[name].packages) and not any(importlib.util.find_spec(package) for package in packages):
        return None
    try:
        return engine_by_name(name).version()
    except EdgeRTError:
        return None


def _python() -> list[list[str | int]]:
    """Return a signature of this Python and its installed packages."""
    signature: list[list[str | int]] = [[sys.executable, sys.version]]
    for folder in sys.path:
        if not folder.endswith("-packages"):  # for example the folder of the command
            continue
        with contextlib.suppress(OSError):
            signature.append([folder, os.stat(folder).st_mtime_ns])
    return signature
