"""The supervisor's answers on its control socket. For apps, see tests/end_to_end/test_daemon.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgert.daemon.model.trial_watch import TrialWatch
from edgert.daemon.supervisor import Supervisor
from edgert.errors import EdgeRTError, ModelNotFound, ProtocolError
from edgert.protocol.control import ask
from edgert.versions.slots import Version
from edgert.versions.trial_limits import TrialLimits
from edgert.worker_link import link
from tests.support.devices import WAIT_S_MAX, Device, a_device
from tests.support.stand_ins.workers import FakeWorker


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device() as one:
        one.put()
        yield one


def obeyed(device: Device, **request: Any) -> dict[str, Any]:
    return ask(device.state.control_socket, request, WAIT_S_MAX)


@pytest.mark.parametrize("model", ["nothing", "../keys", ".", "", "x\0y", "x" * 300, 7])
def test_a_model_that_was_never_installed_is_refused_and_not_listed(device: Device, model: object) -> None:
    with pytest.raises(EdgeRTError, match=r"unknown model .*edgertd install") as raised:
        obeyed(device, op="sync", model=model)
    assert raised.value.code == ModelNotFound.code
    assert list(obeyed(device, op="status")["models"]) == ["echo"]
    with device.client() as client:
        assert [each["name"] for each in client.models()] == ["echo"]


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "dance"},
        {"op": None},
        {"model": "echo"},
        {"op": "sync"},
        {"op": "event"},
        {"op": "event", "event": 7},
        {"op": "checked", "model": "echo", "samples": "many"},
        {"op": "checked", "model": "echo", "samples": math.inf},
    ],
    ids=str,
)
def test_an_invalid_request_is_refused_and_the_daemon_continues(device: Device, request_: dict[str, Any]) -> None:
    with pytest.raises(EdgeRTError) as raised:
        obeyed(device, **request_)
    assert raised.value.code == ProtocolError.code
    assert obeyed(device, op="sync", model="echo")["state"] == "ready"


def test_a_hint_without_a_follower_and_a_report_about_an_unknown_model_are_answered(device: Device) -> None:
    assert obeyed(device, op="follow") == obeyed(device, op="checked", model="nothing", samples=3) == {}


def test_a_model_that_is_installed_while_the_daemon_runs_is_served(device: Device) -> None:
    device.stage(model="other").activate(60)
    assert obeyed(device, op="sync", model="other")["release"] == 1
    with device.client() as client, pytest.raises(EdgeRTError, match="this device has: echo, other"):
        client.metadata("nothing")


@pytest.mark.parametrize("count", [math.inf, "many", None])
def test_a_worker_that_sends_a_wrong_number_is_killed_and_the_daemon_continues(tmp_path: Path, count: object) -> None:
    device = Device(tmp_path)
    device.prepare()
    supervisor, worker = Supervisor(device.state), FakeWorker(Version(1, "digest", good=False), 0.0)
    service = supervisor._service("echo")
    service.trial._watch = TrialWatch(TrialLimits({}, 10.0), worker, 0.0)
    link.send(worker.their_end, {"op": "golden_sent", "count": count})
    supervisor._receive(service, worker)
    assert worker.killed
    assert worker.failure is not None
    assert worker.failure.message.startswith("the worker sent an invalid message")
    worker.close()


def test_any_message_of_a_worker_is_a_sign_of_life_and_no_command_waits_for_the_answer(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.prepare()
    supervisor, worker = Supervisor(device.state), FakeWorker(Version(1, "digest", good=False), 0.0)
    worker.ask(5.0)
    received = link.receive(worker.their_end)
    assert received is not None
    link.send(worker.their_end, {"op": "stats", "id": received[0]["id"], "loaded": {}, "figures": {}})
    supervisor._receive(supervisor._service("echo"), worker)
    assert (worker.asked_s, worker.killed) == (None, False)
    worker.close()


def test_a_model_that_is_installed_while_the_daemon_stops_is_not_started(tmp_path: Path) -> None:
    """The daemon would wait for the end of its worker, which nothing tells to end."""
    device = Device(tmp_path)
    device.prepare()
    supervisor, answers = Supervisor(device.state), list[dict[str, Any]]()
    supervisor._stop()
    device.stage().activate(60)
    supervisor._start_worker = lambda *_: FakeWorker(Version(1, "digest", good=False), 0.0)  # type: ignore[method-assign]
    control = SimpleNamespace(reply=answers.append)
    supervisor._handle_request(control, {"op": "sync", "model": "echo"})  # type: ignore[arg-type]
    assert [answer["error"]["message"] for answer in answers] == ["the daemon is stopping"]
    assert supervisor._done()
    supervisor._reporter.close()
