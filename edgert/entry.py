"""The entry of `edgertd`, which keeps Ctrl-C quiet during the imports.

Until the imports are done, SIGINT ends the process as it ends a program in C. Otherwise, Python would raise
KeyboardInterrupt in the middle of an import and print a traceback.
"""

from __future__ import annotations

import signal


def main() -> int:
    """Import the command line of `edgertd`, run it, and return the exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else the caller ignores SIGINT, as for a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgert.cli import main as edgertd

    signal.signal(signal.SIGINT, handler)
    return edgertd()
