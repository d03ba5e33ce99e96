"""Device profiles for the tests of the packager."""

from __future__ import annotations

from edgert_deploy.devices.profiles import DeviceProfile


def profile(name: str, engine: str = "onnxruntime", *machines: str, then: tuple[str, ...] = ()) -> DeviceProfile:
    return DeviceProfile(name, "", machines, (engine, *then), "int8", "3.10", "2.31", 1, "/s")
