"""The entry of `edgert`."""

from __future__ import annotations

from edgert.entry import run


def main() -> int:
    """Import the command line of `edgert`, run it, and return the exit code."""
    return run("edgert_deploy.cli")
