"""`edgertd self-test`: a runtime checks itself with the installed models, without a daemon."""

from __future__ import annotations

from edgert.bundle.buckets import Buckets, CutOutput, PaddedInput
from edgert.config import read_config
from edgert.tensors import TensorSpec
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device, a_device


def put_live(device: Device, **options: object) -> None:
    install(device.bundle(**options), device.state, read_config(device.state))
    SlotStore(device.state.models / "echo").activate(60)


def test_each_live_model_is_loaded_and_asked_its_golden_inputs() -> None:
    with a_device(started=False) as device:
        assert device.run("self-test")["models"] == []
        put_live(device)
        told = device.run("self-test", "echo")
        assert [(m["model"], m["release"], m["engine"]) for m in told["models"]] == [("echo", 1, "null")]
        assert not device.state.control_socket.exists()
        assert device.run("self-test", "nothing", code=8)["error"]["code"] == "request.model_not_found"


def test_golden_samples_whose_lengths_the_manifest_lacks_are_refused() -> None:
    buckets = Buckets("time", (4,), (PaddedInput("x", 1),), (CutOutput("y", 1),), golden_lengths=(4,))
    specs = {name: (TensorSpec(each, "FP32", (-1, -1)),) for name, each in (("inputs", "x"), ("outputs", "y"))}
    with a_device(started=False) as device:
        put_live(device, rules={**specs, "buckets": buckets})
        error = device.run("self-test", code=5)["error"]
        assert (error["code"], "1 lengths for 2 golden samples" in error["message"]) == ("bundle.corrupt", True)


def test_wrong_answers_fail_the_self_test() -> None:
    with a_device(started=False) as device:
        put_live(device, golden_off_by=1.0)
        assert device.run("self-test", code=9)["error"]["code"] == "device.health_check_failed"
