"""`edgertd status` for people."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from edgert.checks.status import DaemonState, ModelStatus, ServingStatus, TelemetryStatus
from edgert.cli.status import _text
from edgert.telemetry.broker_connection import BrokerConnection
from edgert.telemetry.spans import Percentiles
from tests.support.devices import a_device
from tests.support.statuses import PERCENTILES, device_status, worker_figures


@pytest.mark.parametrize(
    ("engines", "line"),
    [({"null": "1", "fault": "1", "tflite": "2.3.0"}, "tflite 2.3.0"), ({"null": "1", "fault": "1"}, "none")],
)
def test_engines_for_tests_are_not_shown(engines: dict[str, str], line: str) -> None:
    assert f"engines  {line}" in _text(replace(device_status(), engines=engines)).splitlines()


def test_for_a_daemon_that_does_not_run_the_command_that_starts_it_is_shown() -> None:
    text = _text(replace(device_status(), daemon=DaemonState(False)))
    assert "daemon   does not run (edgertd start starts it), socket" in text


def test_a_model_without_answers_has_no_percentiles() -> None:
    for requests, latency, end in (
        (0, Percentiles(0.0, 0.0, 0.0, 0.0, 0.0), "; 0 requests"),
        (9, PERCENTILES, "; 9 requests, p50 1.5 ms, p99 3.5 ms"),
    ):
        figures = worker_figures(requests, {})
        figures = replace(figures, requests=replace(figures.requests, latency_ms=latency))
        model = ModelStatus("digits", "steady", None, None, serving=ServingStatus("ready", figures=figures))
        assert _text(device_status(model)).splitlines()[-1].endswith(end)


def test_the_connection_to_the_broker_is_shown() -> None:
    telemetry = TelemetryStatus("hub:8883", BrokerConnection("telemetry.broker_tls_failed", "no trust", 1), 7, 2)
    assert "broker   no trust; reports: 7 waiting, 2 lost" in _text(device_status(telemetry=telemetry)).splitlines()
    assert "broker" not in _text(device_status())


def test_a_model_whose_folder_was_removed_is_listed_with_the_next_step_until_it_is_deployed_again() -> None:
    with a_device() as device:
        device.put(release=1)
        shutil.rmtree(device.state.models / "echo")
        (model,) = device.run("status")["models"]
        assert (model["live"], model["serving"]["state"]) == (None, "ready")
        fault = f"the folder {device.state.models / 'echo'} was removed, and the device serves it only until the worker ends"
        assert model["serving"]["fault"] == f"{fault}: deploy the model again"
        device.put(release=1)
        (model,) = device.run("status")["models"]
        assert (model["live"]["release"], model["serving"]["fault"]) == (1, None)
