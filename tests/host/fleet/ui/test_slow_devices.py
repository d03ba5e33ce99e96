"""A device is slow above its model's target or, without a target, far above the model's baseline."""

from __future__ import annotations

from edgert_deploy.fleet.live_fleet import DeviceState, ReportedModel
from edgert_deploy.fleet.ui.slow_devices import COMPARED_EVERY_S, SlowDevices

BASELINE = ("digits", "pi")


def a_device(name: str, *p99s: float) -> DeviceState:
    return DeviceState("plant-a", name, 0.0, profile="pi", models={"digits": ReportedModel(p99s=p99s)})


def test_two_devices_are_not_compared_with_each_other() -> None:
    slow, far = SlowDevices({}), a_device("far", 90.0, 90.0, 90.0)
    slow.compare([a_device("near", 10.0), far], 0.0)
    assert slow.why(far, 1) is None


def test_peers_are_compared_again_only_after_a_while() -> None:
    slow, far = SlowDevices({}), a_device("far", 90.0, 90.0, 90.0)
    slow.compare([], 0.0)
    fleet = [a_device("a", 10.0), a_device("b", 10.0), far]
    slow.compare(fleet, COMPARED_EVERY_S - 1)
    assert slow.why(far, 1) is None
    slow.compare(fleet, COMPARED_EVERY_S)
    assert slow.why(far, 1) == ("digits p99 90 ms, 9.0 times its baseline", 1)


def test_a_value_at_the_limit_is_not_slow() -> None:
    slow = SlowDevices({})
    slow.usual_ms = {BASELINE: 10.0}
    assert slow.why(a_device("pi", 20.0, 20.0, 20.0), 1) is None
    assert slow.why(a_device("pi", 20.1, 20.1, 20.1), 1) is not None
    assert SlowDevices({"digits": 20.0}).why(a_device("pi", 20.0, 20.0, 20.0), 1) is None


def test_a_fleet_that_became_slow_together_is_slow() -> None:
    slow, fleet = SlowDevices({}), [a_device(name, 50.0, 50.0, 50.0) for name in "abc"]
    slow.usual_ms = {BASELINE: 10.0}
    slow.compare(fleet, 0.0)
    assert all(slow.why(device, 1) for device in fleet)


def test_the_time_since_a_device_is_slow_begins_anew_after_a_recovery() -> None:
    slow = SlowDevices({"digits": 20.0})
    assert slow.why(a_device("pi", 30.0, 30.0, 30.0), 1) == ("digits p99 30 ms, target 20 ms", 1)
    assert (slow.why(a_device("pi", 30.0, 30.0, 40.0), 2) or ("", 0))[1] == 1
    assert slow.why(a_device("pi", 30.0, 40.0, 10.0), 3) is None
    assert (slow.why(a_device("pi", 30.0, 30.0, 30.0), 4) or ("", 0))[1] == 4
