"""`edgertd status` for people."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from edgert.checks.status import TelemetryStatus
from edgert.cli.status import _text
from edgert.telemetry.broker_connection import BrokerConnection
from tests.support.devices import a_device
from tests.support.statuses import device_status


@pytest.mark.parametrize(
    ("engines", "line"),
    [({"null": "1", "fault": "1", "tflite": "2.3.0"}, "tflite 2.3.0"), ({"null": "1", "fault": "1"}, "none")],
)
def test_engines_for_tests_are_not_shown(engines: dict[str, str], line: str) -> None:
    assert f"engines  {line}" in _text(replace(device_status(), engines=engines)).splitlines()


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
