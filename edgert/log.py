"""The daemon's log: lines on stderr, which a service manager or `edgertd start` keeps.

Text of a client or a bundle in a message can neither start a new line nor control a terminal. Several processes write
to one file. If the disk is full, the line is lost and the process continues.
"""

from __future__ import annotations

import contextlib
import sys
import time

from edgert.printable import printable


def log(line: str) -> None:
    """Write one line with the time, UTC."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
        sys.stderr.write(f"{stamp} {printable(line, newlines=False)}\n")
        sys.stderr.flush()
