"""LitServe with its fast queue, one worker, no batching: POST /predict with raw FP32 bytes, raw FP32 bytes back.

Run it as `-m bench.support.peer_servers.litserve_server SPEC PORT`.
"""

# No `from __future__ import annotations`: LitServe reads the annotations at run time.
import sys
from pathlib import Path
from typing import Annotated, Any

import litserve
import numpy as np
from fastapi import Body, Response

from bench.support.peer_servers.session import open_first


class Digits(litserve.LitAPI):  # type: ignore[misc]  # LitServe is not followed
    def __init__(self, spec: Path) -> None:
        super().__init__()
        self._note = spec

    def setup(self, device: str) -> None:
        self._session = open_first(self._note)
        self._shape = self._session.inputs[0].item_shape

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Any:
        return np.frombuffer(request, np.float32).reshape(-1, *self._shape)

    def predict(self, x: Any) -> Any:
        return self._session.run([x])[0]

    def encode_response(self, output: Any) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(
        Digits(Path(sys.argv[1])), accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=False
    )
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False, generate_client_file=False)
