"""Free ports for servers that need a port number before they start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below the ports that the kernel gives to connections, and to servers that leave the choice to it: no other test gets
# one of these by chance between the choice of a port and its use, or while a server is down.
_PORTS = range(20_000, 32_000)
_chance = random.SystemRandom()


def free_port() -> int:
    """Return a port that no process uses on any address of this machine."""
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
