"""The host's side of a test: `edgert` with its own configuration folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edgert.bundle.signing import SigningKey, read_signing_key
from edgert.errors import DeviceUnreachable
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.transports import Result, Transport, open_transport
from hil.support.dut import Dut
from tests.support.paths import DIGITS, ROOT
from tests.support.shell import EDGERT, edgert_apart, edgert_here, environment_of

COMMAND_S_MAX = 3600  # TensorRT builds its engine in the first install
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A host with its keys, inventory and bundles in `folder`, running the source tree `tree`.

    It keeps the connections of `over`: a login takes longer than most commands.
    """

    folder: Path
    tree: Path = ROOT
    _kept: dict[Device, Transport] = field(default_factory=dict, init=False, repr=False, compare=False)

    def edgert(self, *words: object, code: int = 0) -> dict[str, Any]:
        """Run `edgert WORDS --json`, check its exit code, and return its answer.

        Another tree runs in a process of its own, this one without the time that a new process takes to import it.
        """
        given = [*map(str, words), "--json"]
        if self.tree == ROOT:
            done = edgert_here(given, self.tree, EDGERT_CONFIG_DIR=str(self.folder))
        else:
            done = edgert_apart(given, self.tree, self.environment, COMMAND_S_MAX)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return dict(json.loads(done.stdout))

    def started(self, *words: object) -> subprocess.Popen[str]:
        """Start `edgert WORDS` with its stderr readable, for tests that end it early."""
        return subprocess.Popen(
            [*EDGERT, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.tree,
            env={**self.environment, "PYTHONUNBUFFERED": "1"},
        )

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.tree, EDGERT_CONFIG_DIR=str(self.folder))

    def add(self, dut: Dut) -> None:
        optional = [(f"--{name}", getattr(dut, name)) for name in ("identity", "home", "state") if getattr(dut, name)]
        self.edgert(
            "device", "add", dut.name, dut.address, "--fingerprint", dut.fingerprint, "--profile", dut.profile,
            *(word for pair in optional for word in pair), *(("--sudo",) if dut.sudo else ()),
        )  # fmt: skip

    @property
    def key(self) -> SigningKey:
        found = self.folder / "keys/default.key.pem"
        return read_signing_key(found)

    def device(self, name: str) -> Device:
        return Inventory(self.folder / "inventory.toml").device(name)

    def digits(self, profile: str, release: int) -> Path:
        """Build the example's bundle for `profile` once; return its path."""
        out = self.folder / f"digits-{profile}-{release}.edgert"
        if not out.exists():
            self.edgert(
                "build", DIGITS / "digits.onnx", "--calibration", DIGITS / "calibration.npz",
                "--holdout", DIGITS / "holdout.npz", "--target", profile, "--release", release, "--out", out,
            )  # fmt: skip
        return out

    def model(self, device: str, model: str) -> dict[str, Any]:
        """Return the status of one of a device's models."""
        models = self.edgertd(device, "status")["models"]
        return dict(next(each for each in models if each["model"] == model))

    def is_ready(self, device: str, model: str) -> bool:
        """Return whether the model serves. A daemon that has just started does not list it yet."""
        return (self.model(device, model).get("serving") or {}).get("state") == "ready"

    def on(self, device: str, *argv: str, timeout_s: float = 300.0) -> Result:
        """Run a command on a device and require that it succeeds."""
        result = self.over(device, lambda transport: transport.run(argv, timeout_s))
        assert result.ok, result.failure_text()
        return result

    def edgertd(self, device: str, *words: str) -> dict[str, Any]:
        """Run `edgertd WORDS` on a device."""
        there = self.device(device)
        return self.over(device, lambda transport: RemoteDaemon(transport, there).call(*words, timeout_s=300))

    def over(self, device: str, work: Callable[[Transport], T]) -> T:
        """Do `work` over the kept connection. If it was lost, for example by a reboot, use a new connection."""
        there = self.device(device)
        kept = self._kept.pop(there, None)
        transport = kept or open_transport(there)
        try:
            done = work(transport)
        except BaseException as error:
            transport.close()
            if kept is not None and isinstance(error, DeviceUnreachable):
                return self.over(device, work)
            raise
        self._kept[there] = transport
        return done
