"""The minimum cost of a request in Python: the same bytes there and back, and nothing else.

Two processes with blocking sockets. Over the socket the payload is sent and received. Over shared memory it is copied
in and out, because a server that hashes or runs it must not see it change, and 64 bytes announce it. The answer is as
long as a frame with ten numbers. No frame is parsed, no error is possible, no engine runs.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.support.clients import Ask
from edgert.protocol.local_socket import SEND_BUFFER_BYTES

ANSWER = bytes(192)
WORD = bytes(64)


def echo(item: NDArray[np.uint8], *, shared: bool) -> Callable[[int], Ask]:
    """Return the request function for `Clients`: a client of its own bare server, on the client's cores."""

    def make(_: int) -> Ask:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        area = memoryview(mmap.mmap(-1, item.nbytes))
        if os.fork() == 0:
            ours.close()
            # In a thread other than the main one, like any server of several connections.
            thread = threading.Thread(target=_serve, args=(theirs, area, shared))
            thread.start()
            thread.join()
            os._exit(0)
        theirs.close()
        answer = bytearray(4096)
        payload = item.reshape(-1).data
        place = np.frombuffer(area, np.uint8)

        def ask_shared() -> None:
            place[...] = item.reshape(-1)
            ours.send(WORD)
            ours.recv_into(answer)

        def ask() -> None:
            ours.send(payload)
            ours.recv_into(answer)

        return ask_shared if shared else ask

    return make


def _serve(sock: socket.socket, area: memoryview, shared: bool) -> None:
    """Answer until the client disconnects."""
    own = memoryview(bytearray(len(area)))
    wanted = len(WORD) if shared else len(area)
    while True:
        got = 0
        while got < wanted:
            count = sock.recv_into(own[got:wanted])
            if not count:
                return
            got += count
        if shared:
            own[:] = area
        sock.send(ANSWER)
