"""FastAPI + uvicorn (httptools, one worker): POST /infer with raw FP32 bytes, raw FP32 bytes back.

Run as `python -m bench.peers.fastapi_server STATE PORT THREADS`: it loads the digits version that is live in STATE
through the same engine class with the same options as our worker. The endpoint is a plain function, so it
runs in the server's thread pool, as FastAPI's documentation advises for code that computes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import Body, FastAPI, Response

from bench.raw import open_session


def main() -> None:
    session = open_session(Path(sys.argv[1]), int(sys.argv[3]))
    shape = session.inputs[0].item_shape
    app = FastAPI()

    @app.post("/infer")  # type: ignore[untyped-decorator]  # FastAPI is not followed
    def infer(data: bytes = Body(media_type="application/octet-stream")) -> Response:  # FastAPI idiom
        array = np.frombuffer(data, np.float32).reshape(-1, *shape)
        return Response(session.run([array])[0].tobytes(), media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", http="httptools", access_log=False)


if __name__ == "__main__":
    main()
