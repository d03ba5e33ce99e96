"""FastAPI + uvicorn (uvloop, httptools, one worker): POST /infer/MODEL with raw FP32 bytes, raw FP32 bytes back.

Run it as `-m bench.support.peer_servers.fastapi_server SPEC PORT`, or with the path of a Unix socket instead of the
port. The endpoint runs in the event loop and reads the body itself: for a model of a few microseconds that is faster
than a plain function in FastAPI's thread pool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from bench.support.peer_servers.session import open_spec


def main() -> None:
    sessions = open_spec(Path(sys.argv[1]))
    where = {"port": int(sys.argv[2])} if sys.argv[2].isdigit() else {"uds": sys.argv[2]}
    app = FastAPI()

    @app.post("/infer/{model}")  # type: ignore[untyped-decorator]  # FastAPI is not followed
    async def infer(model: str, request: Request) -> Response:
        session = sessions[model]
        array = np.frombuffer(await request.body(), np.float32).reshape(-1, *session.inputs[0].item_shape)
        return Response(session.run([array])[0].tobytes(), media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", log_level="error", http="httptools", loop="uvloop", access_log=False, **where)


if __name__ == "__main__":
    main()
