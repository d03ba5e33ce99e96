"""`edgertd status`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import replace

import click

from edgert import __version__
from edgert.bundle.expiry import time_text
from edgert.bundle.manifest import Accuracy
from edgert.checks.channel_status import STALE, ChannelStatus, read_channel_status
from edgert.checks.status import (
    DAMAGED,
    DELTA_FORMAT,
    LIMITS_FORMAT,
    ClaimStatus,
    DaemonState,
    DeviceStatus,
    HttpStatus,
    ModelStatus,
    ServingStatus,
    TelemetryStatus,
    ask_daemon,
)
from edgert.cli.output import emit, json_option
from edgert.config import DeviceConfig, read_config
from edgert.engines import FOR_TESTS
from edgert.engines.sdk_versions import engine_versions
from edgert.environment import CODE, code_digest
from edgert.errors import ConfigInvalid, DaemonUnreachable, EdgeRTError, StorageFailed
from edgert.extras import has_tokenizers
from edgert.machine import temp_c
from edgert.printable import counted, endpoint
from edgert.state_dir import StateDir
from edgert.telemetry.broker_connection import read_broker_connection
from edgert.telemetry.spool import Spool, SpoolStats
from edgert.versions.boot_clock import BootClock
from edgert.versions.claims import Claims
from edgert.versions.installed import load_version
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots
from edgert.versions.trust import trusted_keys


@click.command()
@json_option
@click.pass_obj
def status(state: StateDir, as_json: bool) -> None:
    """Show the device, its engines, its models' slots, and the models' state in the daemon.

    \b
    Example:
      edgertd status --json | python3 -m json.tool
    """
    value = device_status(state, read_config(state))
    emit(value.as_json(), _text(value), as_json)


def device_status(state: StateDir, config: DeviceConfig) -> DeviceStatus:
    """Return all facts that a host needs to plan a deployment to this device."""
    try:
        daemon = ask_daemon(state.control_socket)
    except DaemonUnreachable:
        daemon = None
    serving = {} if daemon is None else daemon.models
    ring = trusted_keys(state)
    return DeviceStatus(
        edgert=__version__,
        code=code_digest(CODE),
        delta_format=DELTA_FORMAT,
        limits_format=LIMITS_FORMAT,
        python=platform.python_version(),
        machine=config.machine,
        device=config.device,
        site=config.site,
        profile=config.profile,
        socket=os.fspath(state.socket(config.socket)),
        boot_id=BootClock().boot_id,
        daemon=DaemonState(False) if daemon is None else DaemonState(True, daemon.pid, daemon.memory, daemon.read_only),
        temp_c=temp_c(),
        disk_free_bytes=shutil.disk_usage(state.root).free,
        memory_total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        engines={name: version for name, version in engine_versions(state.learned / "engines.json").items() if version},
        text=has_tokenizers(),
        keys=tuple(dict.fromkeys(key.key_id for key in ring.trusted)),
        damaged_keys=tuple(ring.warnings),
        http=_http(config),
        telemetry=_telemetry(state, config),
        claims=_claims(state, config),
        channel=read_channel_status(state, config),
        models=tuple(_model(state, config, name, serving.get(name)) for name in _names(state, serving)),
    )


def _claims(state: StateDir, config: DeviceConfig) -> tuple[ClaimStatus, ...]:
    claims = Claims(state, config.device)
    return tuple(
        ClaimStatus(claim.model, claim.by, claim.since, round(claims.left_s(claim), 1)) for claim in claims.under_way()
    )


def _http(config: DeviceConfig) -> HttpStatus:
    """Return the status of the HTTP server by its settings. Send no request to the server."""
    if not config.http.listen:
        return HttpStatus()
    from edgert.http.address import parse_address
    from edgert.http.request_parser import check_installed

    listen = config.http.listen
    try:
        check_installed()
    except ConfigInvalid as error:
        return HttpStatus(listen, error.message.replace("DEVICE", config.device), lacks_package=True)
    try:
        parse_address(listen, allow_remote=config.http.allow_remote)
    except ConfigInvalid as error:
        return HttpStatus(listen, error.message.replace("DEVICE", config.device))
    return HttpStatus(listen)


def _telemetry(state: StateDir, config: DeviceConfig) -> TelemetryStatus:
    waiting = SpoolStats(0, 0, {})
    if state.spool.exists():
        # A spool that cannot be read must not prevent a deployment.
        with contextlib.suppress(EdgeRTError), contextlib.closing(Spool(state.spool)) as spool:
            waiting = spool.stats()
    broker = endpoint(config.mqtt.host, config.mqtt.port) if config.mqtt.host else ""
    return TelemetryStatus(broker, read_broker_connection(state.spool.parent), waiting.rows, waiting.lost_total)


def _names(state: StateDir, serving: Mapping[str, ServingStatus]) -> list[str]:
    """Return the installed models, and those whose folders were removed while the daemon serves them."""
    return sorted({*state.model_names(), *serving})


def _model(state: StateDir, config: DeviceConfig, name: str, serving: ServingStatus | None) -> ModelStatus:
    store = SlotStore(state.models / name)
    try:
        slots = store.read()
    except StorageFailed as error:  # the other models are not affected
        return ModelStatus(name, DAMAGED, None, None, damaged=error.message, serving=serving)
    if serving is not None and slots == Slots():
        kept = ", and the device serves it only until the worker ends" if serving.loaded else ""
        serving = replace(serving, fault=f"the folder {store.folder} was removed{kept}: deploy the model again")
    return ModelStatus(
        model=name,
        state=slots.state.value,
        live=slots.live,
        spare=slots.spare,
        ratchet=slots.ratchet,
        trial_limits=slots.limits,
        rolled_back=slots.rolled_back,
        serving=serving,
        accuracy=_accuracy(store, slots, config),
    )


def _accuracy(store: SlotStore, slots: Slots, config: DeviceConfig) -> Accuracy | None:
    """Return the gate's result for the live version's preferred artifact; None if it cannot be read."""
    if slots.live is None:
        return None
    try:
        return load_version(store.live_folder(slots), slots.live.digest, config).artifacts[0].accuracy
    except EdgeRTError:  # a damaged slot does not prevent a deployment
        return None


def _text(status: DeviceStatus) -> str:
    daemon = f"runs (pid {status.daemon.pid})" if status.daemon.running else "does not run (edgertd start starts it)"
    in_use = {model.serving.loaded.engine for model in status.models if model.serving and model.serving.loaded}
    shown = {name: version for name, version in status.engines.items() if name not in FOR_TESTS or name in in_use}
    engines = ", ".join(f"{name} {version}" for name, version in shown.items()) or "none"
    lines = [
        f"device   {status.device} at site {status.site}, profile {status.profile}, {status.machine}",
        f"daemon   {daemon}, socket {status.socket}",
        f"engines  {engines}",
        f"space    {status.disk_free_bytes // 1024**2} MB free",
    ]
    if status.daemon.read_only:
        lines.append("storage  is read-only and may be worn out: live versions are served, every change is refused")
    if memory := status.daemon.memory:
        limit = f" of {memory.limit_mb:g} MB" if memory.limit_mb else ""
        shared = f", and share {memory.shared_mb:.0f} MB more with their clients" if memory.shared_mb else ""
        lines.append(f"memory   the models use {memory.used_mb:.0f} MB{limit}{shared}")
    if status.http.listen:
        lines.append(f"http     {status.http.fault or status.http.listen}")
    if (telemetry := status.telemetry).broker:
        connection = telemetry.connection.text or f"no connection to {telemetry.broker} yet"
        lines.append(f"broker   {connection}; reports: {telemetry.waiting} waiting, {telemetry.lost} lost")
    lines += _channel_lines(status.channel)
    lines += [f"warning  {complaint}" for complaint in status.damaged_keys]
    return "\n".join([*lines, *(_model_line(model) for model in status.models)])


def _channel_lines(channel: ChannelStatus) -> list[str]:
    if not channel.registry:
        return []
    last_answer = f"last answer {time_text(channel.asked_at)}" if channel.asked_at else "no answer yet"
    statement = (
        f"statement {channel.counter}, which expires {channel.expires}" if channel.counter else "no statement yet"
    )
    lines = [f"channel  {channel.channel} in {channel.registry}: {statement}; {last_answer}"]
    lines += [f"channel  the last request to the registry failed: {channel.error}"] if channel.error else []
    lines += [f"channel  alarm {STALE}: {channel.stale}"] if channel.stale else []
    return [*lines, *(f"channel  {step}" for step in channel.steps)]


def _model_line(model: ModelStatus) -> str:
    serving = model.serving or ServingStatus("not served")
    if model.damaged:
        return f"model    {model.model}: damaged, {serving.state}; {model.damaged}"
    release = f"release {model.release}" if model.live else "no release"
    parts = [f"model    {model.model}: {release}, {model.state}, {serving.state}"]
    if loaded := serving.loaded:
        parts[0] += f" on {loaded.engine} {loaded.engine_version}, batches up to {loaded.batch_cap}"
    if serving.figures:
        requests, latency = serving.figures.requests.requests, serving.figures.requests.latency_ms
        # Without answers, percentiles of 0 would look like measurements.
        times = f", p50 {latency.p50} ms, p99 {latency.p99} ms" if latency.max else ""
        parts.append(f"{counted(requests, 'request')}{times}")
        if count := serving.figures.sessions:
            parts.append(f"{counted(count, 'session')}, {serving.figures.session_bytes / 1e6:.1f} MB")
    if (trial := serving.trial) and trial.under_way:
        parts.append(f"its limits are watched for {trial.left_s:.0f} s more: {trial.text}")
    elif model.trial_limits and model.trial_limits.passed:
        parts.append("all trial limits held; the trial waits for mark-good")
    if trial and trial.doubt and trial.release == model.release:
        parts.append(f"its limits held, but {trial.doubt}")
    if failed := model.rolled_back:
        parts.append(f"release {failed.release} was rolled back: {failed.reason}")
    if serving.memory_mb:
        parts.append(f"{serving.memory_mb:.0f} MB" + (", pinned" if serving.pinned else ""))
    if loaded and loaded.tried:
        parts.append(f"not on: {'; '.join(loaded.tried)}")
    if serving.loading:
        parts.append(f"loading: {serving.loading}")
    if serving.crashes:
        parts.append(f"it crashed {counted(serving.crashes, 'time')} in a row")
    if serving.retry_s is not None:
        parts.append(f"next try in {serving.retry_s:.0f} s")
    if serving.fault:
        parts.append(f"fault: {serving.fault}")
    return "; ".join(parts)
