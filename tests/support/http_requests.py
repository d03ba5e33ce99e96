"""Requests to a device's HTTP server and their answers, by hand."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from numpy.typing import NDArray


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def read_answer(file: Any) -> Answer:
    status = int(file.readline().split()[1])
    headers: dict[str, str] = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return Answer(status, headers, file.read(int(headers["content-length"])))


def json_input(array: NDArray[Any], name: str = "x", datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def binary_body(array: NDArray[Any], **changes: Any) -> tuple[bytes, dict[str, str]]:
    """A request in Triton's binary form; `changes` go into its input."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [tensor | changes], "parameters": {"binary_data_output": True}}).encode()
    return head + array.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


@contextmanager
def sent(port: int, data: bytes) -> Iterator[BinaryIO]:
    """Send bytes over a new connection; yield the answer as a file."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, sock.makefile("rb") as file:
        sock.sendall(data)
        yield file
