"""The fastest possible HTTP client: one kept connection, one head for all requests, bodies sent without a copy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEAD_BYTES_MAX = 4096


class HttpAsker:
    """A client that sends POSTs in turn to a (host, port) or a Unix socket; answers need a length.

    Each body begins with `prefix`.
    """

    def __init__(
        self,
        address: tuple[str, int] | Path,
        target: str,
        headers: Mapping[str, str],
        prefix: bytes = b"",
        answer_bytes_max: int = 65536,
    ) -> None:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\n{fields}Content-Length: ".encode()
        self._prefix = prefix
        self._address = address
        self._sock = self._connected()
        self._room = memoryview(bytearray(HEAD_BYTES_MAX + answer_bytes_max))

    def ask(self, body: memoryview | bytes) -> memoryview:
        """Send `body` after the prefix; return the answer's body, valid until the next.

        Asserts status 200. A server may close an idle connection, for example between two rounds: then the client
        connects again.
        """
        try:
            return self._exchange(body)
        except ConnectionError:
            self._sock.close()
            self._sock = self._connected()
            return self._exchange(body)

    def _exchange(self, body: memoryview | bytes) -> memoryview:
        size = memoryview(body).nbytes
        head = b"%b%d\r\n\r\n%b" % (self._head, len(self._prefix) + size, self._prefix)
        if self._sock.sendmsg((head, body)) < len(head) + size:
            raise ConnectionResetError("the server closed the connection during the request")
        room, at, end, size = self._room, 0, -1, 0
        while end < 0 or at < size:
            count = self._sock.recv_into(room[at:])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            at += count
            if end < 0 and (end := bytes(room[: min(at, HEAD_BYTES_MAX)]).find(b"\r\n\r\n")) > 0:
                fields = bytes(room[:end]).lower()
                assert fields[9:12] == b"200", bytes(room[:at])
                size = end + 4 + int(fields.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
        return room[end + 4 : size]

    def _connected(self) -> socket.socket:
        if isinstance(self._address, Path):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(os.fspath(self._address))
            return sock
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def http_asker(port: int, values: NDArray[np.float32], model: str = "echo", tensor_name: str = "x") -> HttpAsker:
    """Return a client of our HTTP server that sends arrays like `values`, and receives, as binary tensors."""
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": tensor_name, "datatype": "FP32", "shape": list(values.shape), "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    fields = {"Inference-Header-Content-Length": str(len(head))}
    return HttpAsker(("127.0.0.1", port), f"/v2/models/{model}/infer", fields, head, 2 * values.nbytes + 4096)
