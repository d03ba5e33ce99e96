"""The worker process: it serves one version of one model.

The supervisor starts the worker with one end of a link (edgert.worker_link.link), orders what to load, and gets `ready`
or `failed`. Then the supervisor passes on clients' connections after it has read their hello. The worker itself never
listens. When the link closes, the worker drains and ends, so it never outlives the daemon.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edgert.checks import golden_samples as golden
from edgert.checks.golden_client import GoldenClient
from edgert.checks.status import LoadedStatus, WorkerFigures
from edgert.config import DeviceConfig, read_config
from edgert.errors import EdgeRTError, EngineFailed, Moved, ShuttingDown
from edgert.log import log
from edgert.machine import prefer_for_oom
from edgert.protocol import wire
from edgert.state_dir import StateDir
from edgert.telemetry.alarms import Alarms
from edgert.telemetry.messages import Topics, release_id
from edgert.telemetry.recorder import WindowRecorder
from edgert.telemetry.reporter import Reporter, ReporterSettings, machine_facts
from edgert.telemetry.sketch import merged
from edgert.telemetry.spool import Spool
from edgert.threads import STACK_BYTES
from edgert.typed_json import from_json, to_json
from edgert.versions.installed import load_version
from edgert.worker.connections.area_budget import AreaBudget, areas_bytes_max
from edgert.worker.connections.connections import Connections
from edgert.worker.connections.reactor import RunLimits
from edgert.worker.connections.sessions import Sessions
from edgert.worker.loading.learning import QUICK_US_MAX, REACTOR_US_MAX
from edgert.worker.loading.model import LoadedModel, load_model, may_have_reactor
from edgert.worker.pipeline.batcher import Batcher
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.near_cache import NearCache, image_axes
from edgert.worker.pipeline.pipeline import Pipeline
from edgert.worker.shadow.agreement import scores_output
from edgert.worker.shadow.shadow import ReferenceProcess, Shadow
from edgert.worker_link import link
from edgert.worker_link.load_order import LoadOrder
from edgert.worker_link.run_page import RunPage

DRAIN_S = 20.0  # the longest wait for engine runs in progress; the worker waits for nothing else
PAIR_US_MIN = 20.0  # from this engine time for one item on, two requests gain from a shared run (decision 17)
RECORDED_S_MAX = 2.0  # the longest wait until the last golden samples are recorded
RECORDED_POLL_S = 0.002
TRIAL_SHARE = 0.25  # the previous version also answers this share of the requests on trial, at idle priority


def main() -> None:
    """Run `python -m edgert.worker.worker`."""
    run(link.inherited_end())


def run(end: socket.socket, *, forked: bool = False) -> NoReturn:
    """Serve the version in the link's first message, then end the process. If `forked`, send its id."""
    code = 1
    try:
        if forked:
            link.send(end, {"op": "started", "pid": os.getpid()})
        code = _serve(end)
    except BaseException:  # noqa: BLE001  # a forked process must not return to the fork server's loop
        traceback.print_exc()
    # Some engines' own threads make the interpreter's exit slow or fatal. Everything that needs a close is closed.
    sys.stderr.flush()
    os._exit(code)


def _serve(end: socket.socket) -> int:
    """Return the exit code."""
    received = link.receive(end)
    if received is None:
        return 0
    order, page = from_json(LoadOrder, received[0]), RunPage(received[1][0])
    state = StateDir(Path(order.state_dir))
    prefer_for_oom(500)  # when memory runs out, the kernel ends a worker before the supervisor
    with contextlib.suppress(OSError):  # `ps` and `top` show the model
        Path("/proc/self/comm").write_text(order.model)
    try:
        config = read_config(state)
        version = load_version(Path(order.folder), order.digest, config)
        model = load_model(version, state, config, lambda line: link.send(end, {"op": "progress", "line": line[:500]}))
        worker = Worker(order, state, config, _watched(model, page))
    except EdgeRTError as error:
        link.send(end, link.failure_message(error))
        return 1
    except Exception as error:  # noqa: BLE001  # any failure of an engine or the disk must reach `edgertd status`
        link.send(end, link.failure_message(EngineFailed(f"{type(error).__name__} while loading: {error}")))
        return 1
    worker.start(end)
    worker.attend(end)
    worker.stop()
    return 0


class Worker:
    """Serves connections on a loaded model until told to stop."""

    def __init__(self, order: LoadOrder, state: StateDir, config: DeviceConfig, model: LoadedModel) -> None:
        serving = config.serving
        manifest = model.version.manifest
        self._model, self._config, self._state = model, config, state
        settings = config.model(manifest.model)
        self._batcher = Batcher(
            model.session,
            model.batch_cap,
            serving.queue_max,
            more_sessions=model.more_sessions,
            reactor_sessions=model.reactor_sessions,
            p95_ms=settings.p95_ms,
        )
        self._cache = PredictionCache(int(serving.cache_mb * 1e6), serving.cache_ttl_s)
        self._near = _near_cache(model, config)
        self._shadow = _shadow(order, config, model, self._notify)
        self._previous = _previous_version(order)
        self._shadows = [shadow for shadow in (self._shadow, self._previous) if shadow is not None]
        self._pipeline = pipeline = Pipeline(model, self._batcher, self._cache, near=self._near, shadows=self._shadows)
        self._recorder = WindowRecorder(manifest.model)
        self._probes = WindowRecorder(manifest.model)  # not requests of apps: telemetry counts them separately
        self._reporter = _reporter(
            order.boot, state, config, model, self._recorder, self._window_facts, pipeline.release_memory
        )
        frame_bytes_max = pipeline.tensors.frame_bytes_max(int(serving.frame_mb * 1024**2))
        welcome = {
            "model": manifest.model,
            "release": manifest.release,
            "engine": model.artifact.engine,
            "artifact": model.artifact.id,
            "frame_bytes_max": frame_bytes_max,
            **pipeline.tensors.welcome(),
        }
        self._sessions = Sessions(pipeline, manifest, model.version.digest, serving, frame_bytes_max)
        self._areas = AreaBudget(areas_bytes_max(serving))
        self._connections = Connections(
            pipeline,
            self._recorder,
            self._probes,
            wire.json_frame(wire.WELCOME, welcome),
            frame_bytes_max,
            serving.connections_max,
            reactor_limits=_reactor_limits(model, config, self._batcher, len(os.sched_getaffinity(0))),
            areas=self._areas,
            sessions=self._sessions,
        )

    def start(self, end: socket.socket) -> None:
        """Begin to report, and tell the supervisor that the worker accepts connections."""
        threading.stack_size(STACK_BYTES)
        for shadow in self._shadows:
            shadow.start()
        self._connections.start()
        if self._reporter is not None:
            reporter = self._reporter
            reporter.alarms_changed = lambda: _send(end, {"op": "alarms", "names": reporter.alarms})
            reporter.start()
            if self._model.degraded:
                self._reporter.event("degraded", reason="; ".join(self._model.tried)[:500])
        link.send(end, {"op": "ready", "loaded": to_json(self._loaded())})

    def attend(self, end: socket.socket) -> None:
        """Handle the supervisor's messages until it sends `stop` or is gone."""
        while (received := link.receive(end)) is not None:
            message, descriptors = received
            if message["op"] == "connection":
                for descriptor in descriptors:
                    # Because family and type are given, Python does not ask the kernel for them.
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)
                    options = {name: bool(message.get(name)) for name in ("shared", "probe", "session")}
                    self._connections.accept(sock, **options)
            elif message["op"] == "stats":
                status = {"loaded": to_json(self._loaded()), "figures": to_json(self._figures_now())}
                _send(end, {"op": "stats", "id": message["id"], **status})
            elif message["op"] == "figures":
                _send(end, {"op": "figures", **self._trial_figures()})
            elif message["op"] == "send_golden":
                try:
                    threading.Thread(target=self._send_golden, args=(end, message), daemon=True).start()
                except RuntimeError as error:  # no more threads: a limit that was not measured counts as broken
                    log(f"{self._model.version.manifest.model}: cannot send the golden samples: {error}")
                    _send(end, {"op": "golden_sent", "count": 0})
            elif message["op"] == "stop":
                if message["final"]:
                    self._send_away("the daemon is stopping")
                return
        self._send_away("the daemon is gone")

    def stop(self) -> None:
        """Finish the engine runs in progress, move every other client, and send the last report."""
        self._connections.stop_reading()
        self._batcher.close(Moved("the model is served by another worker now"))
        self._connections.wait_until_gone(DRAIN_S)
        for shadow in self._shadows:
            shadow.close()
        if self._reporter is not None:
            self._reporter.stop()
        for session in (self._model.session, *self._model.more_sessions, *self._model.reactor_sessions):
            session.close()

    def _send_away(self, reason: str) -> None:
        """From now on, tell clients that must leave to connect again later, instead of at once."""
        self._connections.final_frame = wire.error_frame(ShuttingDown(reason, retry_after_s=1.0))

    def _trial_figures(self) -> dict[str, Any]:
        """Return the figures for the trial limits, of requests of apps and of probes."""
        previous, both = self._previous, [each.snapshot().totals for each in (self._recorder, self._probes)]
        latency = merged([self._recorder.latency(), self._probes.latency()])
        return {
            "requests": sum(totals.requests for totals in both),
            "failed": sum(totals.errors + totals.shed for totals in both),
            "p99_ms": round(latency.quantile(0.99), 4),
            "compared": 0 if previous is None else previous.sampled,
            "agreed": 0 if previous is None else previous.agreed,
        }

    def _send_golden(self, end: socket.socket, message: dict[str, Any]) -> None:
        if self._previous is not None:  # only requests of apps are compared with the previous version
            self._previous.stop_sampling()
        before = self._probes.snapshot().totals.requests
        try:
            with GoldenClient(self._model.version, self._state, self._config) as client:
                count = client.infer_many(int(message["count"]), float(message["for_s"]))
        except EdgeRTError as error:  # no samples: a limit that was not measured counts as broken
            log(f"{self._model.version.manifest.model}: cannot send the golden samples: {error.message}")
            count = 0
        # A request is recorded a moment after its answer was sent. The figures that follow must contain all requests.
        until = time.monotonic() + RECORDED_S_MAX
        while self._probes.snapshot().totals.requests < before + count and time.monotonic() < until:
            time.sleep(RECORDED_POLL_S)
        _send(end, {"op": "golden_sent", "count": count})

    def _loaded(self) -> LoadedStatus:
        model = self._model
        return LoadedStatus(
            release=model.version.manifest.release,
            digest=model.version.digest,
            engine=model.artifact.engine,
            artifact=model.artifact.id,
            engine_version=model.engine_version,
            precision=model.artifact.precision,
            degraded=model.degraded,
            tried=tuple(model.tried),
            batch_cap=self._batcher.cap,
            threads=model.learned.threads,
            instances=self._batcher.instances,
            load_s=round(model.load_s, 3),
        )

    def _notify(self, event: str, fields: Mapping[str, float]) -> None:
        log(f"{self._model.version.manifest.model}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        if self._reporter is not None:
            self._reporter.event(event, **fields)

    def _window_facts(self) -> dict[str, float]:
        """Return the number of probes, and the telemetry of the near cache and the shadow if they are on."""
        probes = {"probe_total": self._probes.snapshot().totals.requests}
        shadow = {} if self._shadow is None else self._shadow.figures()
        return {**probes, **shadow, **({} if self._near is None else self._near.figures())}

    def _figures_now(self) -> WorkerFigures:
        return WorkerFigures(
            connections=len(self._connections),
            reactor_connections=self._connections.in_reactor,
            waiting=self._batcher.waiting,
            batches_closed=dict(self._batcher.close_reasons),
            runs=dict(self._batcher.runs),
            batcher=self._batcher.status(),
            cache=self._cache.status(),
            near=None if self._near is None else self._near.status(),
            shadow=None if self._shadow is None else self._shadow.status(),
            alarms=() if self._reporter is None else self._reporter.alarms,
            requests=self._recorder.snapshot(),
            shared_bytes=self._areas.reserved_bytes,
            sessions=self._sessions.count,
            session_bytes=self._sessions.reserved_bytes,
        )


def _send(end: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the supervisor; if it is gone, `attend` sees that."""
    with contextlib.suppress(OSError):
        link.send(end, message)


def _reporter(
    boot: str,
    state: StateDir,
    config: DeviceConfig,
    model: LoadedModel,
    recorder: WindowRecorder,
    window_facts: Callable[[], Mapping[str, object]],
    release_memory: Callable[[], None],
) -> Reporter | None:
    """Return the thread that reports; None without a spool, because a full disk must not stop serving.

    The thread calls `release_memory` in each window, because silent clients may still hold the memory of large runs.
    """
    try:
        return Reporter(
            recorder,
            Spool(state.spool, log=log),
            ReporterSettings(
                Topics(config.site, config.device),
                boot,
                release_id(model.version.manifest.release),
                config.serving.window_s,
            ),
            alarms=Alarms.of(
                config.alarms, config.model(model.version.manifest.model).p95_ms, config.serving.worker_mb_max
            ),
            facts=lambda: {**window_facts(), **machine_facts()},
            window_ended=release_memory,
            log=log,
        )
    except EdgeRTError as error:
        log(f"telemetry: no reports are written: {error.message}")
        return None


def _watched(model: LoadedModel, page: RunPage) -> LoadedModel:
    """Return `model` with sessions that note their runs on the page."""
    return replace(
        model,
        session=page.watch(model.session),
        more_sessions=tuple(map(page.watch, model.more_sessions)),
        reactor_sessions=tuple(map(page.watch, model.reactor_sessions)),
    )


def _near_cache(model: LoadedModel, config: DeviceConfig) -> NearCache | None:
    """Return the near cache if it is configured and the model takes one image."""
    manifest = model.version.manifest
    distance = config.model(manifest.model).near
    if not distance:
        return None
    if len(manifest.inputs) != 1 or image_axes(manifest.inputs[0]) is None:
        log(
            f"{manifest.model}: near is set, but the model does not take one image of a fixed size: the near cache stays off"
        )
        return None
    samples = [sample[0] for sample in golden.samples(model.version)]
    span = float(max(map(np.max, samples))) - float(min(map(np.min, samples)))
    value_range = 255.0 if manifest.inputs[0].datatype == "UINT8" else span
    return NearCache(manifest.inputs[0], distance, value_range, config.serving.cache_ttl_s, scores_output(manifest))


def _shadow(
    order: LoadOrder, config: DeviceConfig, model: LoadedModel, notify: Callable[[str, Mapping[str, float]], None]
) -> Shadow | None:
    """Return the shadow if it is configured and the bundle has a reference artifact."""
    settings = config.model(order.model)
    if not settings.shadow:
        return None
    if model.version.reference is None:
        log(f"{order.model}: shadow is set, but the bundle has no reference artifact: build it with --with-reference")
        return None
    return Shadow(lambda: ReferenceProcess(order), settings.shadow, settings.shadow_alarm, notify)


def _previous_version(order: LoadOrder) -> Shadow | None:
    """Return the comparison with the previous version, which a trial with a limit on agreement needs.

    The previous version also answers a share of the requests, at idle priority.
    """
    if order.previous is None:
        return None
    folder, digest = order.previous
    before = replace(order, folder=folder, digest=digest)
    return Shadow(lambda: ReferenceProcess(before, as_served=True), TRIAL_SHARE, 0.0, lambda event, fields: None)


def _reactor_limits(model: LoadedModel, config: DeviceConfig, batcher: Batcher, cpus: int) -> RunLimits | None:
    """Return the limits of the reactor; None if each connection has a thread.

    If batches gain nothing, or less than runs of one thread, each request has its own run. Two requests of a very quick
    engine run one by one if there is a processor for the clients: the first client continues while the second request
    runs.
    """
    learned = model.learned
    run_us = learned.run_us.get("1", learned.threads_us.get(str(learned.threads), float("inf")))
    if not may_have_reactor(model.version.manifest, config):
        return None
    if model.reactor_sessions or (batcher.cap == 1 and QUICK_US_MAX < run_us <= REACTOR_US_MAX):
        return RunLimits(2, 1, batcher.instances)
    if batcher.instances > 1 or run_us > QUICK_US_MAX:
        return None
    return RunLimits(3 if cpus > 1 and run_us <= PAIR_US_MIN else 2, batcher.cap)


if __name__ == "__main__":
    main()
