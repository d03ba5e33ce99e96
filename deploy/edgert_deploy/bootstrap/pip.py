"""Runs pip and the build tool. They build edgert's own wheel, and pip downloads the other wheels."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from edgert.errors import ConfigInvalid

PIP_S_MAX = 1800.0
PIWHEELS_HINT = (
    ". Wheels for 32-bit ARM are on piwheels: set PIP_EXTRA_INDEX_URL=https://www.piwheels.org/simple and try again"
)

# The warning of pip's last attempt; the group is the reason, without the name of a Python object.
_BROKEN = re.compile(r"WARNING: Retrying \(Retry\(total=0.*? broken by '(?:.*object at 0x\w+>: )?(.*)")
_NO_TLS = re.compile(r"(There was a problem confirming the ssl certificate: .*)")
_NO_WHEEL = "No matching distribution found"


class NoWheels(ConfigInvalid):
    """The index answers, but has no wheel that fits."""


class IndexUnreachable(ConfigInvalid):
    """The package index does not answer."""


def run_pip(words: Sequence[str], doing: str) -> None:
    """Run `pip WORDS`. If pip fails, raise ConfigInvalid with a message that names the task `doing`.

    Raises NoWheels and IndexUnreachable if this is the cause.
    """
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
        if broken := _BROKEN.search(done.stderr) or _NO_TLS.search(done.stderr):
            raise IndexUnreachable(
                f"cannot {doing}: the package index cannot be reached: {broken[1][:300]}. Check this host's network, "
                "PIP_INDEX_URL and https_proxy, then try again"
            )
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-600:]]
        hint = PIWHEELS_HINT if any("armv7l" in word for word in words) else ""
        kind = NoWheels if any(_NO_WHEEL in line for line in errors) else ConfigInvalid
        raise kind(f"cannot {doing}: {' '.join(errors)[-800:]}{hint}")
