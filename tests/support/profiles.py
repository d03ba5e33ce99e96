"""Device profiles for the tests of the packager."""

from __future__ import annotations

from edgert_deploy.devices.profiles import DeviceProfile

# The file of a profile with one engine.
ONE_ENGINE = """
name = "{name}"
description = "this machine, with one engine"
machines = []
engines = ["{engine}"]
precision = "int8"
python = "3.10"
glibc = "2.28"
memory_mb = 1024
socket = "/run/edgert/edgert.sock"
"""


def profile(name: str, engine: str = "onnxruntime", *machines: str, then: tuple[str, ...] = ()) -> DeviceProfile:
    return DeviceProfile(name, "", machines, (engine, *then), "int8", "3.10", "2.31", 1, "/s")
