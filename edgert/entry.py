"""The entries of `edgertd` and `edgert`, which keep Ctrl-C quiet during the imports.

Until the imports are done, SIGINT ends the process as it ends a program in C. Otherwise, Python would raise
KeyboardInterrupt in the middle of an import and print a traceback.
"""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> int:
    """Import the command line of `edgertd`, run it, and return the exit code."""
    return run("edgert.cli")


def run(package: str) -> int:
    """Import `package`, run its `main`, and return the exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else the caller ignores SIGINT, as for a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command_line = import_module(package)
    signal.signal(signal.SIGINT, handler)
    code: int = command_line.main()
    return code
