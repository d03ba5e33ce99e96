"""The simplest server there is: one loop over Unix sockets, no features, no check of anything.

A request is 8 bytes (the model's number, the payload's length) and raw FP32 bytes; the answer is 4 bytes of length and
raw FP32 bytes. Run it as `python -m bench.support.peer_servers.minimal_server SPEC SOCKET`.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.peer_servers.session import open_spec
from edgert.engines import Session

HEAD, LENGTH = struct.Struct("<II"), struct.Struct("<I")
SEND_BUFFER_BYTES = 1 << 20


def main() -> None:
    sessions = list(open_spec(Path(sys.argv[1])).values())
    rooms = [memoryview(bytearray(4 * int(np.prod(session.inputs[0].item_shape)))) for session in sessions]
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(sys.argv[2])
        listening.listen(256)
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                sock: Any = key.fileobj
                if sock is listening:
                    selector.register(listening.accept()[0], selectors.EVENT_READ)
                elif not answered(sock, sessions, rooms):
                    selector.unregister(sock)
                    sock.close()


def answered(sock: socket.socket, sessions: list[Session], rooms: list[memoryview]) -> bool:
    """Read one request and answer it; return False once the client has gone."""
    head = sock.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        return False
    number, size = HEAD.unpack(head)
    session, room = sessions[number], rooms[number]
    sock.recv_into(room, size, socket.MSG_WAITALL)
    array = np.frombuffer(room, np.float32).reshape(1, *session.inputs[0].item_shape)
    answer = session.run([array])[0].tobytes()
    sock.sendall(LENGTH.pack(len(answer)) + answer)
    return True


def minimal_asker(path: Path, number: int, size_bytes: int) -> Callable[[NDArray[Any]], object]:
    """Return the function that sends an array of `size_bytes` to model `number` and returns the answer."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.connect(str(path))
    head = HEAD.pack(number, size_bytes)

    def ask(array: NDArray[Any]) -> NDArray[np.float32]:
        sock.sendmsg((head, array.data))
        (size,) = LENGTH.unpack(sock.recv(LENGTH.size, socket.MSG_WAITALL))
        return np.frombuffer(sock.recv(size, socket.MSG_WAITALL), np.float32)

    return ask


if __name__ == "__main__":
    main()
