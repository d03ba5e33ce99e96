"""The worker process: one version of one model, a thread a connection or, for a crowd of them, one for all.

It is started by the supervisor with one end of a channel (edgert.worker_link.channel), is told what to load,
says `ready` or `failed`, then receives clients' connections whose hello the supervisor has read. It never
listens on anything itself. When the channel closes it drains and ends, so it never outlives the daemon.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgert.checks import golden_samples as golden
from edgert.checks.status import LoadedStatus, RequestStatus, WorkerFigures
from edgert.checks.trial_preparation import GoldenAsker
from edgert.config import DeviceConfig, StateDir, read_config
from edgert.errors import EdgeRTError, Moved, Overloaded, ProtocolError, ShuttingDown
from edgert.log import log
from edgert.protocol import wire
from edgert.telemetry.alarms import Alarms
from edgert.telemetry.messages import Topics, release_id
from edgert.telemetry.reporter import Reporter, host_facts_now
from edgert.telemetry.spans import WindowRecorder
from edgert.telemetry.spool import Spool
from edgert.threads import STACK_BYTES
from edgert.typed_json import from_json, to_json
from edgert.versions.installed import load_version
from edgert.worker.admission import Admission, Peer
from edgert.worker.agreement import scores_output
from edgert.worker.batcher import Batcher
from edgert.worker.cache import PredictionCache
from edgert.worker.connection import BufferBudget, Connection, Crowd
from edgert.worker.model import LoadedModel, load_model
from edgert.worker.near_cache import NearCache, image_axes
from edgert.worker.pipeline import Pipeline
from edgert.worker.reactor import Leave, Reactor
from edgert.worker.shadow import ReferenceProcess, Shadow
from edgert.worker_link import channel
from edgert.worker_link.run_page import RunPage

STRIKE_S = 0.01  # who breaks the protocol waits so long for the answer: it cannot do so more than 100 times a second
DRAIN_S = 20.0  # for the engine runs under way; nothing else is waited for
CROWD_MIN = 4  # connections; two are served as well by two threads (decision 17)
QUICK_US_MAX = 100.0  # an engine run for one item that may hold up the answers to others
NOTED_S_MAX = 2.0  # for the last of the golden samples that the worker asks itself
TRIAL_SHARE = 0.25  # of the requests on trial, as far as the version before keeps up at idle priority


@dataclass(frozen=True)
class LoadOrder:
    """What the supervisor asks for: the slot's folder, the digest it must have, the daemon's boot id.

    `previous` is the folder and the digest of the version whose answers are to be compared with this one's, if any.
    """

    model: str
    folder: Path
    digest: str
    state: StateDir
    boot: str
    previous: tuple[str, str] | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LoadOrder:
        previous = value.get("previous")
        return cls(
            value["model"],
            Path(value["folder"]),
            value["digest"],
            StateDir(Path(value["state"])),
            value["boot"],
            None if previous is None else (previous[0], previous[1]),
        )


def main() -> None:
    """Entry of `python -m edgert.worker.worker`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    end = socket.socket(fileno=parser.parse_args().channel)
    # The supervisor alone decides when a worker ends; a Ctrl-C in its terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    received = channel.receive(end)
    if received is None:
        return
    order, page = LoadOrder.from_json(received[0]), RunPage(received[1][0])
    _prefer_for_oom()
    try:
        config = read_config(order.state)
        version = load_version(order.folder, order.digest, config)
        model = load_model(
            version, order.state, config, lambda line: channel.send(end, {"op": "progress", "line": line[:500]})
        )
        worker = Worker(order, config, _watched(model, page))
    except EdgeRTError as error:
        channel.send(end, {"op": "failed", "code": error.code, "exit_code": error.exit_code, "message": error.message})
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # what an engine or the disk did must reach `edgertd status`
        message = f"{type(error).__name__} while loading: {error}"
        channel.send(end, {"op": "failed", "code": "device.engine_failed", "exit_code": 7, "message": message[:2000]})
        sys.exit(1)
    worker.start(end)
    worker.attend(end)
    worker.stop()
    # Some engines' own threads make the interpreter's orderly exit slow or fatal; all that matters is closed.
    sys.stderr.flush()
    os._exit(0)


class Worker:
    """Serves connections on a loaded model until told to stop."""

    def __init__(self, order: LoadOrder, config: DeviceConfig, model: LoadedModel) -> None:
        serving = config.serving
        manifest = model.version.manifest
        self._model, self._config = model, config
        wishes = config.model(manifest.model)
        self._batcher = Batcher(
            model.session,
            model.batch_cap,
            serving.queue_max,
            more_sessions=model.more_sessions,
            p95_ms=wishes.p95_ms,
        )
        self._cache = PredictionCache(int(serving.cache_mb * 1e6), serving.cache_ttl_s)
        self._near = _near_cache(model, config)
        self._shadow = _shadow(order, config, model, self._notify)
        self._beside_old = _beside_old(order)
        self._shadows = [shadow for shadow in (self._shadow, self._beside_old) if shadow is not None]
        self._pipeline = Pipeline(model, self._batcher, self._cache, near=self._near, shadows=self._shadows)
        self._golden_asker = GoldenAsker(model.version, order.state, config)
        self._recorder = WindowRecorder(manifest.model)
        self._reporter = _reporter(order, config, model, self._recorder, self._figures)
        welcome = {
            "model": manifest.model,
            "release": manifest.release,
            "engine": model.artifact.engine,
            "artifact": model.artifact.id,
            "frame_bytes_max": self._frame_bytes_max,
            **self._pipeline.welcome(),
        }
        self._welcome = wire.json_frame(wire.WELCOME, welcome)
        self._budget = BufferBudget()
        self._lock = threading.Lock()
        self._admission = Admission(serving.connections_max)
        self._crowd = Crowd()
        self._reactor: Reactor | None = None
        if _answers_quickly(model, self._batcher):
            self._reactor = Reactor(self._pipeline, self._batcher.cap, self._crowd, self._leaves, log)
        self._last_word = wire.json_frame(wire.MOVED, {})
        self._stopping = False

    @property
    def _frame_bytes_max(self) -> int:
        return self._pipeline.frame_bytes_max(int(self._config.serving.frame_mb * 1024**2))

    def start(self, end: socket.socket) -> None:
        """Begin to report, and tell the supervisor that connections may come."""
        threading.stack_size(STACK_BYTES)
        for shadow in self._shadows:
            shadow.start()
        if self._reactor is not None:
            self._reactor.start()
        if self._reporter is not None:
            self._reporter.start()
            if self._model.degraded:
                self._reporter.event("degraded", reason="; ".join(self._model.tried)[:500])
        channel.send(end, {"op": "ready", "loaded": to_json(self._loaded())})

    def attend(self, end: socket.socket) -> None:
        """Take the supervisor's messages until it says stop or is gone."""
        while (received := channel.receive(end)) is not None:
            message, descriptors = received
            if message["op"] == "connection":
                for descriptor in descriptors:
                    self._accept(_client(descriptor), bool(message.get("shared")))
            elif message["op"] == "stats":
                with contextlib.suppress(OSError):  # a supervisor that is gone ends the loop
                    value = {"loaded": to_json(self._loaded()), "figures": to_json(self._figures_now())}
                    channel.send(end, {"op": "stats", "id": message["id"], **value})
            elif message["op"] == "figures":
                with contextlib.suppress(OSError):
                    channel.send(end, {"op": "figures", **self._trial_figures()})
            elif message["op"] == "ask_golden":
                threading.Thread(target=self._ask_golden, args=(end, message), daemon=True).start()
            elif message["op"] == "stop":
                if message["final"]:
                    self._last_word = wire.error_frame(ShuttingDown("the daemon is stopping", retry_after_s=1.0))
                return
        self._last_word = wire.error_frame(ShuttingDown("the daemon is gone", retry_after_s=1.0))

    def stop(self) -> None:
        """End the engine runs under way, send every other client elsewhere, report what is left."""
        with self._lock:
            self._stopping = True
            for sock in self._admission.everybody():
                # What was sent before this is still read and answered; then the thread sees the end.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RD)
        self._batcher.close(Moved("the model is served by another worker now"))
        until = time.monotonic() + DRAIN_S
        while not self._admission.empty and time.monotonic() < until:
            time.sleep(0.002)
        for shadow in self._shadows:
            shadow.close()
        if self._reporter is not None:
            self._reporter.stop()
        for session in (self._model.session, *self._model.more_sessions):
            session.close()

    def _accept(self, sock: socket.socket, shared: bool) -> None:
        with self._lock:
            if not self._stopping and self._admission.take(sock, Peer.of(sock)):
                self._look_around()
                try:
                    # Nobody waits for its end. threading.Thread would have this thread wait for its beginning,
                    # which under a flood of connections costs more than all else here.
                    _thread.start_new_thread(self._serve, (sock, shared))
                    return
                except RuntimeError:  # the system gives no more threads
                    self._admission.give_back(sock)
                    self._look_around()
        error = Overloaded(
            f"{len(self._admission)} clients are connected, the limit, and none has more than its share of them",
            retry_after_s=0.5,
        )
        with contextlib.suppress(OSError):
            sock.send(wire.error_frame(error), socket.MSG_DONTWAIT)
        sock.close()

    def _serve(self, sock: socket.socket, shared: bool) -> None:
        """One connection, from its beginning, in a thread of its own."""
        connection = None
        try:
            connection = Connection(sock, self._pipeline, self._recorder, self._frame_bytes_max, self._budget, log)
            connection.greet(self._welcome, self._pipeline.shared_bytes if shared else 0)
        except (EdgeRTError, OSError) as error:
            self._end(sock, connection, error)
            return
        self._go_on(connection, Leave())

    def _go_on(self, connection: Connection, left: Leave) -> None:
        """Serve a connection, that may have `left` the reactor, until it ends or joins the reactor's."""
        error = left.error
        try:
            if error is None:
                if left.unsent:
                    connection.sock.sendall(left.unsent)
                if connection.serve(self._crowd):
                    assert self._reactor is not None  # or there is never a crowd
                    self._reactor.add(connection)
                    return
        except (EdgeRTError, OSError) as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001  # a fault of ours costs this connection, no more
            log(f"{type(failure).__name__} between requests: {failure}")
            error = failure
        self._end(connection.sock, connection, error)

    def _leaves(self, connection: Connection, left: Leave) -> None:
        """A connection comes from the reactor."""
        try:
            _thread.start_new_thread(self._go_on, (connection, left))
        except RuntimeError as error:  # the system gives no more threads, and the reactor's must not wait for a client
            connection.sock.setblocking(False)
            word = Overloaded(f"no thread to be had: {error}", retry_after_s=0.5)
            self._end(connection.sock, connection, OSError("half of an answer is sent") if left.unsent else word)

    def _end(self, sock: socket.socket, connection: Connection | None, error: Exception | None) -> None:
        """Tell the client why, where there is anything to tell, and forget the connection."""
        with contextlib.suppress(OSError):  # it is gone or takes nothing: there is nobody to tell
            if error is None or isinstance(error, Moved):
                if self._stopping or self._admission.leaves(sock):
                    sock.sendall(self._last_word)
            elif isinstance(error, EdgeRTError):
                if isinstance(error, ProtocolError):
                    time.sleep(STRIKE_S)
                sock.sendall(wire.error_frame(error))
        with self._lock:
            self._admission.give_back(sock)
            self._look_around()
        sock.close()
        if connection is not None:
            connection.close()

    def _look_around(self) -> None:
        """Whether there is a crowd now; under the lock."""
        self._crowd.many = self._reactor is not None and len(self._admission) >= CROWD_MIN

    def _trial_figures(self) -> dict[str, Any]:
        """What a trial's limits are judged by."""
        stats, old = self._recorder.snapshot(), self._beside_old
        return {
            "requests": stats.totals.requests,
            "failed": stats.totals.errors + stats.totals.shed,
            "p99_ms": round(stats.latency.quantile(0.99), 4),
            "compared": 0 if old is None else old.sampled,
            "agreed": 0 if old is None else old.agreed,
        }

    def _ask_golden(self, end: socket.socket, message: dict[str, Any]) -> None:
        if self._beside_old is not None:  # what apps ask is compared, not what we ask ourselves
            self._beside_old.draw_no_more()
        before = self._recorder.snapshot().totals.requests
        try:
            asked = self._golden_asker.ask(int(message["count"]), float(message["for_s"]))
        except EdgeRTError as error:  # the disk gives no samples: what was not measured does not hold
            log(f"{self._model.version.manifest.model}: golden samples cannot be asked: {error.message}")
            asked = 0
        # A request is noted a moment after its answer was sent: what is judged next must have them all.
        until = time.monotonic() + NOTED_S_MAX
        while self._recorder.snapshot().totals.requests < before + asked and time.monotonic() < until:
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            channel.send(end, {"op": "asked_golden", "count": asked})

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
        log(f"{self._model.version.manifest.model}: {event} {dict(fields)}")
        if self._reporter is not None:
            self._reporter.event(event, **fields)

    def _figures(self) -> dict[str, float]:
        """What `metrics` says of the near cache and the shadow, where they are on."""
        shadow = {} if self._shadow is None else self._shadow.figures()
        return shadow if self._near is None else {**shadow, **self._near.figures()}

    def _figures_now(self) -> WorkerFigures:
        return WorkerFigures(
            connections=len(self._admission),
            reactor_connections=0 if self._reactor is None else len(self._reactor),
            waiting=self._batcher.waiting,
            batches_closed=dict(self._batcher.closed),
            runs=dict(self._batcher.runs),
            batcher=self._batcher.status(),
            cache=self._cache.status(),
            near=None if self._near is None else self._near.status(),
            shadow=None if self._shadow is None else self._shadow.status(),
            alarms=() if self._reporter is None else tuple(self._reporter.alarms),
            requests=from_json(RequestStatus, self._recorder.snapshot().as_json()),
        )


def _client(descriptor: int) -> socket.socket:
    """The client behind a descriptor. What is said here of the socket need not be asked of the kernel."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)


def _reporter(
    order: LoadOrder,
    config: DeviceConfig,
    model: LoadedModel,
    recorder: WindowRecorder,
    figures: Callable[[], Mapping[str, object]],
) -> Reporter | None:
    """The thread that reports; None where the spool cannot be opened: a full disk must not stop serving."""
    try:
        return Reporter(
            recorder,
            Spool(order.state.spool, log=log),
            Topics(config.site, config.device),
            boot=order.boot,
            model_version=release_id(model.version.manifest.release),
            window_s=config.serving.window_s,
            host_facts=lambda: {**host_facts_now(), **figures()},
            alarms=Alarms.of(config.alarms, config.model(order.model).p95_ms, config.serving.worker_mb_max),
            log=log,
        )
    except EdgeRTError as error:
        log(f"telemetry: nothing is recorded: {error.message}")
        return None


def _watched(model: LoadedModel, page: RunPage) -> LoadedModel:
    """`model`, the runs of its sessions noted on the page."""
    more = tuple(page.watch(session) for session in model.more_sessions)
    return replace(model, session=page.watch(model.session), more_sessions=more)


def _near_cache(model: LoadedModel, config: DeviceConfig) -> NearCache | None:
    """The near cache where it is asked for and the model's first input is an image."""
    manifest = model.version.manifest
    distance = config.model(manifest.model).near
    if not distance or image_axes(manifest.inputs[0]) is None or len(manifest.inputs) != 1:
        if distance:
            log(f"{manifest.model}: near is set, but the model does not take one image of a fixed size: it stays off")
        return None
    samples = [sample[0] for sample in golden.samples(model.version)]
    span = float(max(map(np.max, samples))) - float(min(map(np.min, samples)))
    value_range = 255.0 if manifest.inputs[0].datatype == "UINT8" else span
    return NearCache(manifest.inputs[0], distance, value_range, config.serving.cache_ttl_s, scores_output(manifest))


def _shadow(
    order: LoadOrder, config: DeviceConfig, model: LoadedModel, notify: Callable[[str, Mapping[str, float]], None]
) -> Shadow | None:
    """The shadow where it is asked for and the bundle carries a reference."""
    wishes = config.model(order.model)
    if not wishes.shadow:
        return None
    if model.version.reference is None:
        log(f"{order.model}: shadow is set, but the bundle carries no reference: build it with --with-reference")
        return None
    given = {**vars(order), "folder": str(order.folder), "state": str(order.state.root)}
    return Shadow(lambda: ReferenceProcess(given), wishes.shadow, wishes.shadow_alarm, notify)


def _beside_old(order: LoadOrder) -> Shadow | None:
    """On trial with a limit on agreement: the version before answers a share of the requests, too, at idle priority."""
    if order.previous is None:
        return None
    folder, digest = order.previous
    given = {"folder": folder, "digest": digest, "state": str(order.state.root), "as_served": True}
    return Shadow(lambda: ReferenceProcess(given), TRIAL_SHARE, 0.0, lambda event, fields: None)


def _answers_quickly(model: LoadedModel, batcher: Batcher) -> bool:
    """Whether its requests may wait for each other in one thread: the engine's part is short, and is all there is.

    A target for its latency needs the batcher to see who waits; an image takes milliseconds to decode.
    """
    learned = model.learned
    run_us = learned.run_us.get("1", learned.threads_us.get(str(learned.threads), float("inf")))
    plain = batcher.tuner is None and batcher.instances == 1 and model.version.manifest.preprocess is None
    return plain and run_us <= QUICK_US_MAX


def _prefer_for_oom() -> None:
    """When memory runs out, the kernel shall end a worker, not the supervisor."""
    with contextlib.suppress(OSError):  # some sandboxes refuse
        Path("/proc/self/oom_score_adj").write_text("500")


if __name__ == "__main__":
    main()
