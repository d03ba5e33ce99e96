"""An example or a small model, built once for several engines, and served by a real daemon on one of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import Device, a_device
from tests.support.profiles import ONE_ENGINE
from tests.support.shell import Shell

MODULES = {"onnxruntime": "onnxruntime", "openvino": "nncf", "tflite": "ai_edge_litert"}
ENGINES = tuple(engine for engine, module in MODULES.items() if importlib.util.find_spec(module) is not None)


@dataclass(frozen=True)
class Built:
    """A bundle with a target for each engine, called like the engine, and the output of each build."""

    model: str
    bundle: Path
    public_key: Path
    targets: dict[str, dict[str, Any]]


def built(shell: Shell, model: str, engines: Sequence[str], *build: str, out: str = "") -> Built:
    """Run `edgert build *build` for all `engines` at once. The bundle has the model's name, or the name `out`."""
    if not engines:
        pytest.skip("no engine is installed")
    profiles, bundle = shell.folder / "profiles", shell.folder / f"{out or model}.edgert"
    profiles.mkdir(exist_ok=True)
    for engine in engines:
        (profiles / f"{engine}.toml").write_text(ONE_ENGINE.format(name=engine, engine=engine))
    if not (shell.folder / "keys").exists():
        assert shell("keys", "new", "--dir", "keys").returncode == 0
    targets = [word for engine in engines for word in ("--target", engine)]
    done = shell(
        "build", *build, "--profiles", "profiles", *targets, "--key", "keys/default.key.pem", "--json",
        "--out", str(bundle),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["engine"]: row for row in json.loads(done.stdout)["targets"]}
    return Built(model, bundle, shell.folder / "keys/default.pem", {engine: rows[engine] for engine in engines})


@contextmanager
def served(made: Built, engine: str, config: str = "") -> Iterator[Device]:
    """Make the bundle live on a new device with that engine and `config`."""
    with a_device(config, started=False) as device:
        written = device.state.config.read_text()
        device.state.config.write_text(written.replace('profile = "this-machine"', f'profile = "{engine}"'))
        (device.state.keys / "builder.pem").write_bytes(made.public_key.read_bytes())
        device.start()
        device.keep(made.model, made.bundle, checked=True)  # golden samples from the raw input on
        assert device.serving(made.model)["engine"] == engine
        yield device
