"""Runs pip and the build tool. They build edgert's own wheel, and pip downloads the other wheels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from edgert.errors import ConfigInvalid

PIP_S_MAX = 1800.0
PIWHEELS_HINT = (
    ". Wheels for 32-bit ARM are on piwheels: set PIP_EXTRA_INDEX_URL=https://www.piwheels.org/simple and try again"
)


def run_pip(words: Sequence[str], doing: str) -> None:
    """Run `pip WORDS`. If pip fails, raise ConfigInvalid with a message that names the task `doing`."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigInvalid(f"cannot {doing}: pip is missing. Install it: {sys.executable} -m ensurepip")
    run_module("pip", ["--disable-pip-version-check", "--no-input", *words], doing)


def run_module(module: str, words: Sequence[str], doing: str, cwd: Path | None = None) -> None:
    """Run `python -m MODULE WORDS` in `cwd`. Raises ConfigInvalid, which names the task `doing`."""
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S_MAX, check=False, cwd=cwd)
    except subprocess.TimeoutExpired as error:
        raise ConfigInvalid(f"{module} did not {doing} within {PIP_S_MAX:.0f} s: check the network") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-600:]]
        hint = PIWHEELS_HINT if any("armv7l" in word for word in words) else ""
        raise ConfigInvalid(f"cannot {doing}: {' '.join(errors)[-800:]}{hint}")
