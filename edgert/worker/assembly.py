"""The assembly of a worker: creates its parts and connects them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgert.checks import golden_samples as golden
from edgert.config import DeviceConfig
from edgert.log import log
from edgert.protocol import wire
from edgert.state_dir import StateDir
from edgert.telemetry.alarms import Alarms
from edgert.telemetry.messages import Topics, release_id
from edgert.telemetry.reporter import Reporter, ReporterSettings, machine_facts
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spool import Spool
from edgert.worker.connections.connections import Connections
from edgert.worker.connections.reactor import RunLimits
from edgert.worker.connections.sessions import Sessions
from edgert.worker.connections.shared_memory import SharedMemoryBudget, shared_bytes_max
from edgert.worker.loading.learning import QUICK_US_MAX, REACTOR_US_MAX
from edgert.worker.loading.model import LoadedModel, may_have_reactor
from edgert.worker.pipeline.batcher import Batcher
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.near_cache import NearCache, image_axes
from edgert.worker.pipeline.pipeline import Pipeline
from edgert.worker.shadow.agreement import scores_output
from edgert.worker.shadow.shadow import ReferenceProcess, Shadow
from edgert.worker_link.load_message import LoadMessage

PAIR_US_MIN = 20.0  # above this engine time for one item, two requests gain from a shared run (decision 17)
TRIAL_SHARE = 0.25  # during a trial, the previous version also answers this share of the requests, at idle priority


@dataclass(frozen=True)
class WorkerParts:
    """The parts of one worker.

    Attributes:
        near: The near cache; None if it is off.
        shadow: The comparison with the reference artifact.
        previous: The comparison with the previous version, if a trial limits the agreement.
        app_spans: Counts the requests of apps.
        probe_spans: Counts the requests of checks.
    """

    model: LoadedModel
    batcher: Batcher
    cache: PredictionCache
    near: NearCache | None
    shadow: Shadow | None
    previous: Shadow | None
    shadows: tuple[Shadow, ...]
    app_spans: SpanCounter
    probe_spans: SpanCounter
    reporter: Reporter
    shared_memory: SharedMemoryBudget
    sessions: Sessions
    connections: Connections


def assemble(load_message: LoadMessage, state: StateDir, config: DeviceConfig, model: LoadedModel) -> WorkerParts:
    """Create the parts that serve `model`, and connect them. `Worker.start` starts their threads."""
    serving, name = config.serving, model.version.manifest.model
    app_spans = SpanCounter(name)
    probe_spans = SpanCounter(name)

    def notify(event: str, fields: Mapping[str, float]) -> None:
        log(f"{name}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        reporter.event(event, **fields)  # assigned below, before the shadow starts

    batcher = _batcher(model, config)
    cache = PredictionCache(int(serving.cache_mb * 1e6), serving.cache_ttl_s)
    near = _near_cache(model, config)
    shadow = _shadow(load_message, config, model, notify)
    previous = _previous_version(load_message)
    shadows = tuple(each for each in (shadow, previous) if each is not None)
    pipeline = Pipeline(model, batcher, cache, near=near, shadows=shadows)
    reporter = _reporter(
        load_message.boot,
        state,
        config,
        model,
        app_spans,
        lambda: _facts(probe_spans, shadow, near),
        pipeline.release_memory,
    )
    frame_bytes_max = pipeline.tensors.frame_bytes_max(int(serving.frame_mb * 1024**2))
    shared_memory = SharedMemoryBudget(shared_bytes_max(serving))
    sessions = Sessions(pipeline, model.version, serving, frame_bytes_max)
    connections = Connections(
        pipeline=pipeline,
        app_spans=app_spans,
        probe_spans=probe_spans,
        welcome=_welcome(model, pipeline, frame_bytes_max),
        frame_bytes_max=frame_bytes_max,
        connections_max=serving.connections_max,
        reactor_limits=reactor_limits(model, config, batcher, len(os.sched_getaffinity(0))),
        shared_memory=shared_memory,
        sessions=sessions,
    )
    return WorkerParts(
        model=model,
        batcher=batcher,
        cache=cache,
        near=near,
        shadow=shadow,
        previous=previous,
        shadows=shadows,
        app_spans=app_spans,
        probe_spans=probe_spans,
        reporter=reporter,
        shared_memory=shared_memory,
        sessions=sessions,
        connections=connections,
    )


def reactor_limits(model: LoadedModel, config: DeviceConfig, batcher: Batcher, cpus: int) -> RunLimits | None:
    """Return the limits of the reactor; None if each connection has a thread.

    If batches gain nothing, or gain less than runs of one thread, each request has its own run. With a very quick
    engine, two requests also run one by one, if a processor is left for the clients. Then the first client continues
    while the second request runs.
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


def _batcher(model: LoadedModel, config: DeviceConfig) -> Batcher:
    return Batcher(
        model.session,
        model.learned.batch_cap,
        config.serving.queue_max,
        more_sessions=model.more_sessions,
        reactor_sessions=model.reactor_sessions,
        p95_ms=config.model(model.version.manifest.model).p95_ms,
    )


def _welcome(model: LoadedModel, pipeline: Pipeline, frame_bytes_max: int) -> bytes:
    """Return the frame that greets each client: the model and its tensors."""
    manifest = model.version.manifest
    welcome = {
        "model": manifest.model,
        "release": manifest.release,
        "engine": model.artifact.engine,
        "artifact": model.artifact.id,
        "frame_bytes_max": frame_bytes_max,
        **pipeline.tensors.welcome(),
    }
    return wire.json_frame(wire.WELCOME, welcome)


def _near_cache(model: LoadedModel, config: DeviceConfig) -> NearCache | None:
    """Return the near cache; None if it is not configured, or if the model does not take one image."""
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
    load_message: LoadMessage,
    config: DeviceConfig,
    model: LoadedModel,
    notify: Callable[[str, Mapping[str, float]], None],
) -> Shadow | None:
    """Return the shadow; None if it is not configured, or if the bundle has no reference artifact."""
    settings = config.model(load_message.model)
    if not settings.shadow:
        return None
    if model.version.reference is None:
        log(
            f"{load_message.model}: shadow is set, but the bundle has no reference artifact: build it with --with-reference"
        )
        return None
    return Shadow(lambda: ReferenceProcess(load_message), settings.shadow, settings.shadow_alarm, notify)


def _previous_version(load_message: LoadMessage) -> Shadow | None:
    """Return the comparison with the previous version; None if no trial limits the agreement."""
    if load_message.previous is None:
        return None
    folder, digest = load_message.previous
    before = replace(load_message, folder=folder, digest=digest)
    return Shadow(lambda: ReferenceProcess(before, as_served=True), TRIAL_SHARE, 0.0, lambda event, fields: None)


def _reporter(
    boot: str,
    state: StateDir,
    config: DeviceConfig,
    model: LoadedModel,
    app_spans: SpanCounter,
    facts: Callable[[], Mapping[str, object]],
    window_ended: Callable[[], None],
) -> Reporter:
    """Return the thread that reports.

    The thread calls `window_ended` once per window, to release the memory of large runs: their clients may be silent
    now.
    """
    return Reporter(
        app_spans,
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
        facts=facts,
        window_ended=window_ended,
        log=log,
    )


def _facts(probe_spans: SpanCounter, shadow: Shadow | None, near: NearCache | None) -> dict[str, object]:
    """Return the number of probes, the figures of the parts that are on, and the facts of the machine."""
    facts: dict[str, object] = {"probe_total": probe_spans.snapshot().totals.requests}
    for part in (shadow, near):
        if part is not None:
            facts |= part.figures()
    return facts | machine_facts()
