"""An example or a small model, built for one engine and served by a real daemon."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.devices import Device, a_device
from tests.support.profiles import ONE_ENGINE
from tests.support.shell import Shell

ENGINES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "tflite": "ai_edge_litert"}


@contextmanager
def built_and_served(shell: Shell, model: str, engine: str, *build: str) -> Iterator[tuple[Device, dict[str, Any]]]:
    """Build with `edgert build *build`, deploy as `model`; yield the device and the build's target."""
    if importlib.util.find_spec(ENGINES[engine]) is None:
        pytest.skip(f"{engine} is not installed")
    folder = shell.folder / engine
    folder.mkdir(exist_ok=True)
    (folder / "this-machine.toml").write_text(ONE_ENGINE.format(engine=engine))
    if not (shell.folder / "keys").exists():
        assert shell("keys", "new", "--dir", "keys").returncode == 0
    bundle = folder / f"{model}.edgert"
    done = shell(
        "build", *build, "--profiles", engine, "--target", "this-machine", "--key", "keys/default.key.pem", "--json",
        "--out", str(bundle),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(row for row in json.loads(done.stdout)["targets"] if row["engine"] == engine)
    with a_device(started=False) as device:
        (device.state.keys / "builder.pem").write_bytes((shell.folder / "keys/default.pem").read_bytes())
        device.start()
        device.run("install", str(bundle))
        device.run("activate", model)
        assert device.run("check", model)["ok"]  # golden samples through the socket, from the raw input on
        yield device, row
