"""`edgertd status`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from dataclasses import asdict
from typing import Any

import click

from edgert import __version__
from edgert.bundle.signing import read_keyring
from edgert.cli.output import emit
from edgert.config import DeviceConfig, StateDir, read_config
from edgert.engines.present import engine_versions
from edgert.errors import ConfigInvalid, DaemonUnreachable, EdgeRTError, StorageFailed
from edgert.machine import temp_c
from edgert.protocol.control import ask
from edgert.telemetry.link import read_link
from edgert.telemetry.spool import Spool, SpoolStats
from edgert.versions.claims import Claims
from edgert.versions.slots import BootClock, SlotState, SlotStore, Version

GATES = 1  # the format of limits that `activate` takes; a host sends none to devices that do not say it
DAMAGED = "damaged"  # the state of a model whose state.json cannot be read; nothing else is known of it
DELTAS = 1  # the format of deltas that `install` takes; a host sends whole bundles to devices that do not say it


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def status(state: StateDir, as_json: bool) -> None:
    """Show the device, its engines, its models' slots, and what the daemon does with them.

    \b
    Example:
      edgertd status --json | python3 -m json.tool
    """
    value = device_status(state, read_config(state))
    emit(value, _text(value), as_json)


def device_status(state: StateDir, config: DeviceConfig) -> dict[str, Any]:
    """All that a host needs to plan a deployment to this device, as JSON values."""
    try:
        daemon = ask(state.control_socket, {"op": "status"}, 5.0)
    except DaemonUnreachable:
        daemon = {}
    ring = read_keyring(state.keys)
    return {
        "edgert": __version__,
        "deltas": DELTAS,
        "gates": GATES,
        "python": platform.python_version(),
        "machine": config.machine,
        "device": config.device,
        "site": config.site,
        "profile": config.profile,
        "socket": os.fspath(state.socket(config)),
        "boot_id": BootClock().boot_id,
        "daemon": {"running": bool(daemon), "pid": daemon.get("pid"), "memory": daemon.get("memory")},
        "temp_c": temp_c(),
        "disk_free_bytes": shutil.disk_usage(state.root).free,
        "memory_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "engines": engine_versions(state.learned / "engines.json"),
        "keys": list(dict.fromkeys(key.key_id for key in ring.trusted)),
        "damaged_keys": ring.complaints,
        "http": _http(config),
        "telemetry": _telemetry(state, config),
        "claims": _claims(state, config),
        "models": [_model(state, name, daemon.get("models", {}).get(name)) for name in state.model_names()],
    }


def _claims(state: StateDir, config: DeviceConfig) -> list[dict[str, Any]]:
    """The deployments under way: of which model, by whom, since when, and for how long they last where nothing comes."""
    claims = Claims(state.root, config.device)
    return [
        {"model": one.model, "by": one.by, "since": one.since, "left_s": round(claims.left_s(one), 1)}
        for one in claims.under_way()
    ]


def _http(config: DeviceConfig) -> dict[str, Any]:
    """Where `[http]` is to listen ("" for nowhere), and what keeps it from doing so as far as can be told without it."""
    if not config.http.listen:
        return {"listen": "", "fault": ""}
    from edgert.http.address import parse_address
    from edgert.http.connection import check_installed

    try:
        check_installed()
        parse_address(config.http.listen, allow_remote=config.http.allow_remote)
    except ConfigInvalid as error:
        return {"listen": config.http.listen, "fault": error.message.replace("DEVICE", config.device)}
    return {"listen": config.http.listen, "fault": ""}


def _telemetry(state: StateDir, config: DeviceConfig) -> dict[str, Any]:
    """Where reports go ("" for nowhere), how the connection stands, and what waits on disk or was lost there."""
    waiting = SpoolStats(0, 0, {})
    if state.spool.exists():
        # Reports that cannot be counted hold up no deployment.
        with contextlib.suppress(EdgeRTError), contextlib.closing(Spool(state.spool)) as spool:
            waiting = spool.stats()
    broker = f"{config.mqtt.host}:{config.mqtt.port}" if config.mqtt.host else ""
    link = read_link(state.spool.parent)
    return {"broker": broker, "link": link, "waiting": waiting.rows, "lost": waiting.lost_total}


def _model(state: StateDir, name: str, serving: dict[str, Any] | None) -> dict[str, Any]:
    damaged = ""
    try:
        slots = SlotStore(state.models / name).read()
    except StorageFailed as error:  # that model alone; the others are as they are
        slots, damaged = SlotState(), error.message

    def described(version: Version | None) -> dict[str, Any] | None:
        return None if version is None else asdict(version)

    return {
        "model": name,
        "state": DAMAGED if damaged else slots.state.value,
        "damaged": damaged,
        "ratchet": slots.ratchet,
        "gate": None if slots.gate is None else asdict(slots.gate),
        "returned": None if slots.returned is None else asdict(slots.returned),
        "active": described(slots.version(slots.active)),
        "spare": described(slots.version(slots.spare)),
        "serving": serving,
    }


def _text(value: dict[str, Any]) -> str:
    daemon = f"runs (pid {value['daemon']['pid']})" if value["daemon"]["running"] else "does not run"
    engines = ", ".join(f"{name} {version}" for name, version in value["engines"].items() if version)
    lines = [
        f"device   {value['device']} at site {value['site']}, profile {value['profile']}, {value['machine']}",
        f"daemon   {daemon}, socket {value['socket']}",
        f"engines  {engines}",
        f"space    {value['disk_free_bytes'] // 1024**2} MB free",
    ]
    if memory := value["daemon"]["memory"]:
        limit = f" of {memory['limit_mb']:g} MB" if memory["limit_mb"] else ""
        lines.append(f"memory   models take {memory['used_mb']:.0f} MB{limit}")
    if value["http"]["listen"]:
        lines.append(f"http     {value['http']['fault'] or value['http']['listen']}")
    lines += [f"warning  {complaint}" for complaint in value["damaged_keys"]]
    return "\n".join([*lines, *(_model_line(model) for model in value["models"])])


def _model_line(model: dict[str, Any]) -> str:
    active, serving = model["active"], model["serving"] or {}
    if model["damaged"]:
        return f"model    {model['model']}: damaged, {serving.get('state', 'not served')}; {model['damaged']}"
    release = f"release {active['release']}" if active else "no release"
    line = f"model    {model['model']}: {release}, {model['state']}, {serving.get('state', 'not served')}"
    if serving.get("engine"):
        line += f" on {serving['engine']} {serving['engine_version']}, batches up to {serving['batch_cap']}"
    if "requests" in serving:
        requests, latency = serving["requests"], serving["requests"]["latency_ms"]
        line += f"; {requests['requests']} requests, p50 {latency['p50']} ms, p99 {latency['p99']} ms"
    watch = serving.get("watch")
    if watch and watch["phase"] in ("watching", "filling"):
        line += f"; its limits are watched for {watch['left_s']:.0f} s more: {watch['text']}"
    elif (model["gate"] or {}).get("passed"):
        line += "; it kept its limits and waits for mark-good"
    if returned := model["returned"]:
        line += f"; release {returned['release']} went back: {returned['reason']}"
    if serving.get("memory_mb"):
        line += f"; {serving['memory_mb']:.0f} MB" + (", pinned" if serving.get("pinned") else "")
    if serving.get("tried"):
        line += f"; not on: {'; '.join(serving['tried'])}"
    if serving.get("doing"):
        line += f"; loading: {serving['doing']}"
    if serving.get("crashes"):
        line += f"; {serving['crashes']} crashes in a row"
    if serving.get("retry_s") is not None:
        line += f"; tried again in {serving['retry_s']:.0f} s"
    return f"{line}; fault: {serving['fault']}" if serving.get("fault") else line
