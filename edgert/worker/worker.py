"""The worker process: it serves one version of one model.

The supervisor starts the worker with one end of a link (edgert.worker_link.link) and orders the version to load. The
worker answers `ready` or `failed`. For each client, the supervisor reads the hello and then passes the connection on.
The worker itself never listens. When the link closes, the worker drains and ends, so it never outlives the daemon.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from edgert.checks.golden_client import GoldenClient
from edgert.checks.status import LoadedStatus, WorkerFigures
from edgert.config import DeviceConfig, read_config
from edgert.errors import EdgeRTError, EngineFailed, Moved, ShuttingDown
from edgert.log import log
from edgert.machine import prefer_for_oom
from edgert.protocol import wire
from edgert.protocol.hello import HelloFlags
from edgert.state_dir import StateDir
from edgert.telemetry.sketch import merged
from edgert.threads import STACK_BYTES
from edgert.typed_json import from_json, to_json
from edgert.versions.installed import load_version
from edgert.worker.assembly import WorkerParts, assemble
from edgert.worker.loading.model import LoadedModel, load_model
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from edgert.worker_link.run_page import RunPage

DRAIN_S = 20.0  # the longest wait for engine runs in progress; the worker waits for nothing else
RECORDED_S_MAX = 2.0  # the longest wait until the last golden samples are recorded
RECORDED_POLL_S = 0.002


def main() -> None:
    """Run `python -m edgert.worker.worker`."""
    run(link.inherited_end())


def run(end: socket.socket, *, forked: bool = False) -> NoReturn:
    """Serve the version in the link's first message, then end the process. If `forked`, send its id first."""
    code = 1
    try:
        if forked:
            link.send(end, {"op": "started", "pid": os.getpid()})
        code = _serve(end)
    except BaseException:  # noqa: BLE001  # a forked process must not return to the fork server's loop
        traceback.print_exc()
    # Some engines' own threads make the interpreter's exit slow or fatal. `Worker.stop` has closed all resources.
    sys.stderr.flush()
    os._exit(code)


def _serve(end: socket.socket) -> int:
    """Load the version and serve it until the link closes; return the exit code."""
    received = link.receive(end)
    if received is None:
        return 0
    load_message, page = from_json(LoadMessage, received[0]), RunPage(received[1][0])
    state = StateDir(Path(load_message.state_dir))
    prefer_for_oom(500)  # when memory runs out, the kernel ends a worker before the supervisor
    with contextlib.suppress(OSError):  # `ps` and `top` show the model
        Path("/proc/self/comm").write_text(load_message.model)
    try:
        config = read_config(state)
        version = load_version(Path(load_message.folder), load_message.digest, config)
        model = load_model(version, state, config, lambda line: link.send(end, {"op": "progress", "line": line[:500]}))
        worker = Worker(assemble(load_message, state, config, _with_run_page(model, page)), state, config)
    except EdgeRTError as error:
        _send(end, link.failure_message(error))
        return 1
    except Exception as error:  # noqa: BLE001  # any failure of an engine or the disk must reach `edgertd status`
        _send(end, link.failure_message(EngineFailed(f"{type(error).__name__} while loading: {error}")))
        return 1
    try:
        worker.start(end)
        worker.handle_messages(end)
    finally:
        worker.stop()
    return 0


class Worker:
    """Serves connections with a loaded model until the supervisor stops it."""

    def __init__(self, parts: WorkerParts, state: StateDir, config: DeviceConfig) -> None:
        self._state = state
        self._config = config
        self._parts = parts

    def start(self, end: socket.socket) -> None:
        """Begin to report and tell the supervisor that the worker accepts connections."""
        parts = self._parts
        threading.stack_size(STACK_BYTES)
        for shadow in parts.shadows:
            shadow.start()
        parts.connections.start()
        reporter = parts.reporter
        reporter.alarms_changed = lambda: _send(end, {"op": "alarms", "names": reporter.alarms})
        reporter.start()
        if parts.model.degraded:
            reporter.event("degraded", reason="; ".join(parts.model.tried)[:500])
        _send(end, {"op": "ready", "loaded": to_json(self._loaded())})

    def handle_messages(self, end: socket.socket) -> None:
        """Handle the supervisor's messages until it sends `stop` or is gone."""
        while (received := link.receive(end)) is not None:
            message, descriptors = received
            if message["op"] == "connection":
                for descriptor in descriptors:
                    # With family and type, Python does not need to ask the kernel for them.
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)
                    self._parts.connections.accept(sock, HelloFlags.from_json(message))
            elif message["op"] == "stats":
                status = {"loaded": to_json(self._loaded()), "figures": to_json(self._figures_now())}
                _send(end, {"op": "stats", "id": message["id"], **status})
            elif message["op"] == "figures":
                _send(end, {"op": "figures", **self._trial_figures()})
            elif message["op"] == "send_golden":
                try:
                    threading.Thread(target=self._send_golden, args=(end, message), daemon=True).start()
                except RuntimeError as error:  # no more threads: a limit that was not measured counts as broken
                    log(f"{self._parts.model.version.manifest.model}: cannot send the golden samples: {error}")
                    _send(end, {"op": "golden_sent", "count": 0})
            elif message["op"] == "stop":
                if message["final"]:
                    self._tell_clients_to_leave("the daemon is stopping")
                return
        self._tell_clients_to_leave("the daemon has ended")

    def stop(self) -> None:
        """Finish the engine runs in progress, move every other client, and send the last report."""
        parts = self._parts
        parts.connections.stop_reading()
        parts.batcher.close(Moved("the model is served by another worker now"))
        parts.connections.wait_until_gone(DRAIN_S)
        for shadow in parts.shadows:
            shadow.close()
        parts.reporter.stop()
        for session in (parts.model.session, *parts.model.more_sessions, *parts.model.reactor_sessions):
            session.close()

    def _tell_clients_to_leave(self, reason: str) -> None:
        """From now on, tell clients that must leave to connect again later, instead of at once."""
        self._parts.connections.final_frame = wire.error_frame(ShuttingDown(reason, retry_after_s=1.0))

    def _trial_figures(self) -> dict[str, Any]:
        """Return the figures for the trial limits, of requests of apps and of probes."""
        parts = self._parts
        previous = parts.previous
        both = [each.snapshot().totals for each in (parts.app_spans, parts.probe_spans)]
        latency = merged([parts.app_spans.latency(), parts.probe_spans.latency()])
        return {
            "requests": sum(totals.requests for totals in both),
            "failed": sum(totals.errors + totals.shed for totals in both),
            "p99_ms": round(latency.quantile(0.99), 4),
            "compared": 0 if previous is None else previous.sampled,
            "agreed": 0 if previous is None else previous.agreed,
        }

    def _send_golden(self, end: socket.socket, message: dict[str, Any]) -> None:
        parts = self._parts
        if parts.previous is not None:  # these golden samples are not compared with the previous version
            parts.previous.stop_sampling()
        before = parts.probe_spans.snapshot().totals.requests
        try:
            with GoldenClient(parts.model.version, self._state, self._config) as client:
                count = client.infer_many(int(message["count"]), float(message["for_s"]))
        except EdgeRTError as error:  # no samples: a limit that was not measured counts as broken
            log(f"{parts.model.version.manifest.model}: cannot send the golden samples: {error.message}")
            count = 0
        # A request is recorded a moment after its answer was sent. The next figures must contain all requests.
        until = time.monotonic() + RECORDED_S_MAX
        while parts.probe_spans.snapshot().totals.requests < before + count and time.monotonic() < until:
            time.sleep(RECORDED_POLL_S)
        _send(end, {"op": "golden_sent", "count": count})

    def _loaded(self) -> LoadedStatus:
        parts = self._parts
        model = parts.model
        return LoadedStatus(
            release=model.version.manifest.release,
            digest=model.version.digest,
            engine=model.artifact.engine,
            artifact=model.artifact.id,
            engine_version=model.engine_version,
            precision=model.artifact.precision,
            degraded=model.degraded,
            tried=tuple(model.tried),
            batch_cap=parts.batcher.cap,
            threads=model.learned.threads,
            instances=parts.batcher.instances,
            load_s=round(model.load_s, 3),
        )

    def _figures_now(self) -> WorkerFigures:
        parts = self._parts
        return WorkerFigures(
            connections=len(parts.connections),
            reactor_connections=parts.connections.in_reactor,
            waiting=parts.batcher.waiting,
            batches_closed=dict(parts.batcher.close_reasons),
            runs=dict(parts.batcher.runs),
            batcher=parts.batcher.status(),
            cache=parts.cache.status(),
            near=None if parts.near is None else parts.near.status(),
            shadow=None if parts.shadow is None else parts.shadow.status(),
            alarms=parts.reporter.alarms,
            requests=parts.app_spans.snapshot(),
            shared_bytes=parts.shared_memory.reserved_bytes,
            sessions=parts.sessions.count,
            session_bytes=parts.sessions.reserved_bytes,
        )


def _send(end: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the supervisor. If the supervisor is gone, `handle_messages` notices."""
    with contextlib.suppress(OSError):
        link.send(end, message)


def _with_run_page(model: LoadedModel, page: RunPage) -> LoadedModel:
    """Return `model` with sessions that note their runs on `page`."""
    return replace(
        model,
        session=page.track(model.session),
        more_sessions=tuple(map(page.track, model.more_sessions)),
        reactor_sessions=tuple(map(page.track, model.reactor_sessions)),
    )


if __name__ == "__main__":
    main()
