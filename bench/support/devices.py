"""Daemons on state folders of their own, with the models of a benchmark, driven by our own commands."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.bundles import make_zeros_bundle
from edgert.bundle.signing import new_key
from tests.support.paths import DIGITS


@dataclass(frozen=True)
class BenchModel:
    """A model to build and serve: its file, and samples to send. INT8 unless `precision` says otherwise."""

    name: str
    source: Path
    calibration: Path
    holdout: Path
    precision: str = "int8"

    def items(self, count: int) -> list[NDArray[Any]]:
        """Return samples [1, ...], contiguous."""
        (values,) = (values for name, values in np.load(self.holdout).items() if name != "labels")
        return [np.ascontiguousarray(values[i : i + 1]) for i in range(count)]


DIGITS_MODEL = BenchModel("digits", DIGITS / "digits.onnx", DIGITS / "calibration.npz", DIGITS / "holdout.npz")


@contextmanager
def digits_device(config: str = "") -> Iterator[tuple[Path, Path]]:
    """Run a daemon that serves digits; yield its state folder and socket, which are removed afterwards."""
    with device_with([DIGITS_MODEL], config) as (state, path):
        yield state, path


@contextmanager
def device_with(models: Sequence[BenchModel], config: str = "") -> Iterator[tuple[Path, Path]]:
    """Run a daemon that serves the models; yield its state folder and socket, removed afterwards.

    Once it has learned, it is started again as after a reboot: without the batches of learning, and if there are
    several models, each has a worker that is a fork (decision 24).
    """
    with state_folder() as state:
        folder = state.parent
        edgert("keys", "new", "--dir", str(folder / "keys"))
        start(state, (folder / "keys/default.pem").read_bytes(), config)
        for model in models:
            bundle = folder / f"{model.name}.edgert"
            edgert(
                "build", str(model.source), "--name", model.name, "--precision", model.precision,
                "--calibration", str(model.calibration), "--holdout", str(model.holdout), "--target", "this-machine",
                "--key", str(folder / "keys/default.key.pem"), "--out", str(bundle),
            )  # fmt: skip
            deploy(state, model.name, bundle)
        edgertd(state, "stop")
        edgertd(state, "start")
        for model in models:
            while serving(state, model.name)["state"] in ("waiting", "loading"):
                time.sleep(0.1)
        yield state, state / "edgert.sock"


@contextmanager
def null_device(items: Mapping[str, NDArray[Any]], config: str = "", *, delay_s: float = 0.0) -> Iterator[Path]:
    """Run a daemon with a null-engine model per entry and input; yield its state folder."""
    with state_folder() as state:
        key = new_key()
        start(state, key.public.pem(), config)
        for model, item in items.items():
            deploy(state, model, make_zeros_bundle(state.parent, key, model, item, delay_s=delay_s))
        yield state


@contextmanager
def state_folder() -> Iterator[Path]:
    """Yield the path of a new state folder, in a folder for other files; end its daemon afterwards."""
    with tempfile.TemporaryDirectory(prefix="edgert-bench-", ignore_cleanup_errors=True) as folder:
        state = Path(folder) / "state"
        try:
            yield state
        finally:
            if state.exists():
                edgertd(state, "stop")


def start(state: Path, public_pem: bytes, config: str = "") -> None:
    """Start a daemon on a new state folder. `config` is appended to its config.toml."""
    (state / "keys").mkdir(parents=True)
    (state / "keys" / "bench.pem").write_bytes(public_pem)
    (state / "config.toml").write_text(f'device = "d-bench"\nprofile = "this-machine"\n{config}')
    edgertd(state, "start")


def deploy(state: Path, model: str, bundle: Path) -> None:
    """Make the bundle's model live and mark it good."""
    edgertd(state, "install", str(bundle))
    edgertd(state, "activate", model)
    edgertd(state, "mark-good", model)


def serving(state: Path, model: str) -> dict[str, Any]:
    """Return the daemon's status of a model."""
    return dict(next(m for m in edgertd(state, "status")["models"] if m["model"] == model)["serving"])


def edgert(*words: str) -> None:
    _command("edgert_deploy.cli", *words)


def edgertd(state: Path, *words: str) -> dict[str, Any]:
    return dict(json.loads(_command("edgert.cli", "--state", str(state), *words, "--json")))


def _command(package: str, *words: str) -> str:
    """Run one of our commands and return its stdout; end the benchmark with its message on failure."""
    done = subprocess.run([sys.executable, "-m", package, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout
