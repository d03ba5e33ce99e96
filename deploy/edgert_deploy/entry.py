"""The entry of `edgert`, which keeps Ctrl-C quiet during the imports, like edgert.entry."""

from __future__ import annotations

import signal


def main() -> int:
    """Import the command line of `edgert`, run it, and return the exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgert_deploy.cli import main as edgert

    signal.signal(signal.SIGINT, handler)
    return edgert()
