"""The whole path on a device under test: bare, bootstrap, deploy, right answers, second release, way back.

    make hil DUT=hil/duts/my-board.toml

The device keeps what bootstrap installed; its models are rolled back to nothing where they were made here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from edgert_deploy.inventory import Device, Inventory
from edgert_deploy.profiles import DeviceProfile, load_profile
from edgert_deploy.transports import open_transport
from hil.dut import Dut, read_dut
from hil.sshd import running_sshd

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples/digits"
DUT_FILE = Path(os.environ.get("EDGERT_DUT", ROOT / "hil/duts/loopback.toml"))
COMMAND_S_MAX = 3600  # TensorRT builds its engine in the first install
ACCURACY_MIN = 0.98


@dataclass(frozen=True)
class Bench:
    """The host's side: a configuration folder of its own and the device under test, already added."""

    folder: Path
    dut: Dut
    profile: DeviceProfile

    def edgert(self, *words: object, code: int = 0) -> dict[str, Any]:
        main = "import sys; from edgert_deploy.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", main, *map(str, words), "--json"],
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            env={**os.environ, "EDGERT_CONFIG_DIR": str(self.folder)},
        )
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return dict(json.loads(done.stdout))

    @property
    def device(self) -> Device:
        return Inventory(self.folder / "inventory.toml").device(self.dut.name)

    def bundle(self, release: int) -> Path:
        out = self.folder / f"digits-{release}.edgert"
        if not out.exists():
            self.edgert(
                "build", DIGITS / "digits.onnx", "--calibration", DIGITS / "calibration.npz",
                "--holdout", DIGITS / "holdout.npz", "--target", self.profile.name,
                "--release", release, "--out", out,
            )  # fmt: skip
        return out

    def deploy(self, release: int) -> None:
        self.edgert("deploy", self.bundle(release), "--to", self.dut.name)

    def live(self) -> dict[str, Any]:
        """What the device says of `digits`."""
        (row,) = self.edgert("status", self.dut.name)["devices"]
        return next(model for model in row["status"]["models"] if model["model"] == "digits")

    def accuracy(self) -> dict[str, Any]:
        """Hold-out accuracy, computed by a client on the device."""
        transport = open_transport(self.device)
        try:
            (row,) = self.edgert("status", self.dut.name)["devices"]
            folder = f"{self.device.state}/incoming"
            for file in (ROOT / "hil/on_device/accuracy.py", DIGITS / "holdout.npz"):
                transport.put(file, f"{folder}/{file.name}")
            python = f"{self.device.home}/venv/bin/python"
            result = transport.run(
                [python, f"{folder}/accuracy.py", row["status"]["socket"], f"{folder}/holdout.npz"], COMMAND_S_MAX
            )
            assert result.ok, result.complaint()
            return dict(json.loads(result.stdout))
        finally:
            transport.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    dut = read_dut(DUT_FILE)
    with ExitStack() as stack:
        if dut.virtual == "sshd":
            sshd = stack.enter_context(running_sshd(tmp_path_factory.mktemp("device")))
            dut = replace(
                dut,
                address=sshd.address,
                fingerprint=sshd.fingerprint,
                identity=str(sshd.client_key),
                home=str(sshd.home / "edgert"),
                state=str(sshd.state),
            )
        made = Bench(tmp_path_factory.mktemp("host"), dut, load_profile(dut.profile, ROOT / "devices"))
        made.edgert("keys", "new")
        optional = [(f"--{name}", getattr(dut, name)) for name in ("identity", "home", "state") if getattr(dut, name)]
        made.edgert(
            "device", "add", dut.name, dut.address, "--fingerprint", dut.fingerprint, "--profile", dut.profile,
            *(word for pair in optional for word in pair),
        )  # fmt: skip
        made.edgert("bootstrap", dut.name, *(("--service", "keeper") if dut.virtual else ()))
        yield made
        if dut.virtual:
            transport = open_transport(made.device)
            transport.run([f"{made.device.home}/venv/bin/edgertd", "--state", made.device.state, "stop"], 60)
            transport.close()


def test_the_first_engine_of_the_profile_serves_right_answers(bench: Bench) -> None:
    bench.deploy(1)
    measured = bench.accuracy()
    print(f"\n{bench.dut.name}: {measured}")
    assert measured["engine"] == bench.profile.engines[0]
    assert measured["accuracy"] >= ACCURACY_MIN
    assert bench.live()["serving"]["degraded"] is False


def test_a_second_release_takes_over_and_the_first_comes_back(bench: Bench) -> None:
    bench.deploy(2)
    assert bench.live()["active"]["release"] == 2
    bench.edgert("rollback", "digits", "--on", bench.dut.name)
    assert bench.live()["active"]["release"] == 1
    assert bench.accuracy()["accuracy"] >= ACCURACY_MIN


def test_an_older_release_is_refused(bench: Bench) -> None:
    bench.deploy(2)
    bench.edgert("deploy", bench.bundle(1), "--to", bench.dut.name, code=5)
    assert bench.live()["active"]["release"] == 2
