"""The peers as running servers: started on a free port, checked with one request, stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.http_client import HttpAsker
from bench.support.peer_servers.environments import environment
from bench.support.peer_servers.minimal_server import minimal_asker
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port

START_S_MAX = 60.0
AskWith = Callable[[NDArray[Any]], object]
Asking = Callable[[str, NDArray[Any]], AskWith]
BINARY = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True)
class Server:
    """A peer that answers: its first process, and a factory of clients for a model and its arrays."""

    name: str
    pid: int
    asking: Asking


def minimal(folder: Path, spec: Path) -> tuple[list[str], Asking]:
    path = folder / "minimal.sock"
    models = list(json.loads(spec.read_text()))

    def asking(model: str, array: NDArray[Any]) -> AskWith:
        return minimal_asker(path, models.index(model), array.nbytes)

    return ["-m", "bench.support.peer_servers.minimal_server", str(spec), str(path)], asking


def over_tcp(module: str, target: str) -> Callable[[Path, Path], tuple[list[str], Asking]]:
    """Return a peer whose `module` serves arrays of bytes on a port, at the address `target`."""

    def peer(_folder: Path, spec: Path) -> tuple[list[str], Asking]:
        port = free_port()
        words = ["-m", f"bench.support.peer_servers.{module}", str(spec), str(port)]
        return words, _binary(("127.0.0.1", port), target)

    return peer


def fastapi_unix(folder: Path, spec: Path) -> tuple[list[str], Asking]:
    path = folder / "fastapi.sock"
    return ["-m", "bench.support.peer_servers.fastapi_server", str(spec), str(path)], _binary(path, "/infer/{model}")


def mlserver(folder: Path, spec: Path) -> tuple[list[str], Asking]:
    place = folder / "mlserver"
    place.mkdir()
    ports = {f"{kind}_port": free_port() for kind in ("http", "grpc", "metrics")}
    settings = {"host": "127.0.0.1", "parallel_workers": 0, "debug": False, "use_structured_logging": False, **ports}
    (place / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": "digits",
        "implementation": "bench.support.peer_servers.mlserver_model.Digits",
        "parameters": {"uri": str(spec)},
    }
    (place / "model-settings.json").write_text(json.dumps(model))

    def asking(_: str, array: NDArray[Any]) -> AskWith:
        asker = HttpAsker(
            ("127.0.0.1", ports["http_port"]), "/v2/models/digits/infer", {"Content-Type": "application/json"}
        )
        form = {"name": "image", "datatype": "FP32", "shape": list(array.shape)}

        def ask(given: NDArray[Any]) -> NDArray[np.float32]:
            body = json.dumps({"inputs": [form | {"data": given.ravel().tolist()}]}, separators=(",", ":")).encode()
            return np.array(json.loads(bytes(asker.ask(body)))["outputs"][0]["data"], np.float32)

        return ask

    return ["-c", "from mlserver.cli import main; main()", "start", str(place)], asking


def _binary(address: tuple[str, int] | Path, target: str) -> Asking:
    def asking(model: str, _: NDArray[Any]) -> AskWith:
        asker = HttpAsker(address, target.format(model=model), BINARY)
        return lambda given: np.frombuffer(asker.ask(given.data), np.float32).copy()

    return asking


# name -> its environment ("": this one), its start command and its client
PEERS = {
    "minimal": ("", minimal),
    "fastapi": ("fastapi", over_tcp("fastapi_server", "/infer/{model}")),
    "fastapi-unix": ("fastapi", fastapi_unix),
    "litserve": ("litserve", over_tcp("litserve_server", "/predict")),
    "mlserver": ("mlserver", mlserver),
}
ONE_MODEL = ("litserve", "mlserver")  # they serve the first model of the spec


@contextmanager
def running(
    name: str, environments: Path, folder: Path, spec: Path, first: str, item: NDArray[Any]
) -> Iterator[Server]:
    """Run the peer `name` with its files in `folder`, and ask its model `first` once. Raises OSError."""
    home, make = PEERS[name]
    python = environment(environments, home) if home else Path(sys.executable)
    words, asking = make(folder, spec)
    log = (folder / f"{name}.log").open("wb")
    # The peers' path has only what they import: of ours the engine's wrapper and the model.
    server = subprocess.Popen(
        [str(python), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        _first_answer(server, lambda: asking(first, item)(item), folder / f"{name}.log")
        yield Server(name, server.pid, asking)
    finally:
        log.close()
        _stop(server)


def _first_answer(server: subprocess.Popen[bytes], ask: Callable[[], object], log: Path) -> None:
    until = time.monotonic() + START_S_MAX
    while True:
        try:
            ask()
            return
        except (OSError, AssertionError) as error:  # the server or its model is not ready yet
            if server.poll() is not None or time.monotonic() > until:
                said = "; ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
                raise OSError(f"does not answer: {error}; {said}") from error
        time.sleep(0.1)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Stop it and the workers that it started."""
    try:
        os.killpg(server.pid, 15)
        server.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    with suppress(ProcessLookupError):
        os.killpg(server.pid, 9)
    server.wait(10)
