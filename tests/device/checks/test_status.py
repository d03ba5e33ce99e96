"""Statuses: the host reads the same values that the device reports; any other JSON is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgert.checks.status import DeviceStatus, ModelStatus, ServingStatus
from edgert.checks.trial_status import TrialPhase, TrialStatus
from edgert.typed_json import Mistyped, from_json
from edgert.versions.slots import RolledBackVersion, Version
from edgert.versions.trial_limits import Readings, TrialLimits
from tests.support.statuses import LOADED, device_status, worker_figures

SERVING = ServingStatus(
    "ready",
    trial=TrialStatus(3, TrialPhase.WATCHING, 12.5, Readings(requests=9), "9 requests"),
    pid=7,
    memory_mb=41.0,
    loaded=LOADED,
    figures=worker_figures(100, {"idle": 10}),
)
MODEL = ModelStatus(
    "echo",
    "trial",
    Version(3, "new", good=False),
    Version(2, "old", good=True),
    ratchet=2,
    trial_limits=TrialLimits({"p99_ms": 8.0}, 60.0),
    rolled_back=RolledBackVersion(1, "bad", "it crashed", 5.0),
    serving=SERVING,
)
STATUS = device_status(MODEL, keys=("k",))


def test_a_status_is_read_back_from_json_unchanged() -> None:
    assert from_json(DeviceStatus, json.loads(json.dumps(STATUS.as_json()))) == STATUS
    serving = STATUS.as_json()["models"][0]["serving"]
    assert (serving["engine"], serving["requests"]["requests"]) == ("tflite", 100), (
        "what a worker says is beside the rest"
    )


def test_models_are_found_by_name() -> None:
    assert STATUS.model("echo") == MODEL
    assert STATUS.model("other") is None
    assert (MODEL.on_trial, MODEL.release) == (True, 3)


def spoil(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(STATUS.as_json()))
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("machine"), "lacks 'machine'"),
        (lambda v: v.update(daemon=True), "daemon is True, not an object"),
        (lambda v: v["daemon"].update(pid="7"), "daemon.pid is '7'"),
        (lambda v: v["models"][0]["serving"].update(pid=[7]), r"models\[0\].serving.pid is of type list"),
        (lambda v: v["models"][0]["serving"]["requests"].pop("window"), r"models\[0\].serving.requests lacks 'window'"),
        (lambda v: v["models"][0]["trial_limits"]["bounds"].update(p99_ms=-1), "limit p99_ms is -1"),
    ],
)
def test_an_invalid_status_is_an_error_that_names_the_field(change: Callable[[Any], object], words: str) -> None:
    with pytest.raises(Mistyped, match=words):
        from_json(DeviceStatus, spoil(change))


IN_JSON: dict[str, Any] = {
    "edgert": "0.1.0",
    "python": "3.11.2",
    "machine": "aarch64",
    "device": "board",
    "site": "default",
    "profile": "raspberry-pi-4",
    "boot_id": "b",
    "daemon": {"running": False, "pid": None},
    "disk_free_bytes": 7,
    "memory_total_bytes": 9,
    "engines": {"null": "1", "tflite": "2.3.0"},
    "keys": ["k"],
    "models": [
        {
            "model": "echo",
            "state": "steady",
            "ratchet": 6,
            "live": {"release": 5, "digest": "d", "good": True},
            "spare": None,
            "serving": None,
        }
    ],
}


def test_a_status_is_read_from_json() -> None:
    read = from_json(DeviceStatus, IN_JSON)
    assert read.engines == {"null": "1", "tflite": "2.3.0"}
    assert read.models == (ModelStatus("echo", "steady", Version(5, "d", True), None, ratchet=6),)
    assert not read.daemon.running


@pytest.mark.parametrize("key", ["machine", "daemon", "models", "engines", "disk_free_bytes"])
def test_a_status_without_a_required_field_is_an_error(key: str) -> None:
    with pytest.raises(Mistyped, match=f"lacks {key!r}"):
        from_json(DeviceStatus, {k: v for k, v in IN_JSON.items() if k != key})
