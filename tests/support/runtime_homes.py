"""A device whose daemon runs from a HOME of runtimes, as `edgert bootstrap` leaves it, and wheels of other versions.

The environment in use finds the packages of the tests; edgert itself is installed into it by pip, from its wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import edgert
from edgert.bundle.runtime_release import RuntimeRelease, RuntimeTarget, Wheel
from edgert.config import read_config
from edgert_deploy.bootstrap.own_wheel import own_wheel
from edgert_deploy.bootstrap.runtime import script_text
from tests.support.devices import Device
from tests.support.stand_ins.runtimes import STAND_IN

FIRST = "0" * 16  # the runtime in use at first
STEP_S_MAX = 240.0
PYTHON = "{}.{}".format(*sys.version_info)
WHEEL = f"edgert-{edgert.__version__}-py3-none-any.whl"


class HomeDevice(Device):
    """A device with runtimes in HOME."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def in_use(self) -> str:
        return (self.home / "venv").readlink().name

    @property
    def runtimes(self) -> set[str]:
        return {path.name for path in (self.home / "venvs").iterdir()}

    def install_first(self, wheel: Path) -> None:
        """Make the runtime that a bootstrap would have made and put it into use."""
        venv = self.home / "venvs" / FIRST
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=STEP_S_MAX)
        (site,) = venv.glob("lib/python*/site-packages")
        found = [path for path in sys.path if path.endswith("site-packages")]
        (site / "found.pth").write_text("".join(f"{path}\n" for path in found))
        options = ["--no-index", "--no-deps", "--force-reinstall", "--no-compile", "--quiet"]
        subprocess.run([venv / "bin/python", "-m", "pip", "install", *options, wheel], check=True, timeout=STEP_S_MAX)
        about = {
            "edgert": "0",
            "engines": ["null"],
            "extras": [],
            "wheels": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()},
        }
        (venv / ".complete").write_text(json.dumps(about))
        (self.home / "runtime.sh").write_bytes(script_text())
        (self.home / "venv").symlink_to(venv)

    def edgertd(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the runtime in use."""
        command = [os.fspath(self.home / "venv/bin/edgertd"), "--state", os.fspath(self.state.root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=STEP_S_MAX)

    def follow(self) -> str:
        """Run one round with the runtime in use; return its result."""
        done = self.edgertd("follow")
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.edgertd("status", "--json").stdout))

    def daemon_runtime(self) -> str:
        """Return the id of the runtime that the running daemon is; empty while none runs."""
        if (pid := self.daemon_pid()) is None:
            return ""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return Path(os.fsdecode(words[0])).parent.parent.name


@contextmanager
def a_device_with_home(wheel: Path, registry: str) -> Iterator[HomeDevice]:
    """Yield a device that serves `echo` from its own HOME and follows `stable` in `registry`."""
    device = HomeDevice(Path(tempfile.mkdtemp(prefix="edgert-")))
    try:
        device.prepare(f'[follow]\nregistry = "{registry}"\n')
        device.install_first(wheel)
        subprocess.run(["sh", device.home / "runtime.sh", "start", device.state.root], check=True, timeout=STEP_S_MAX)
        device.put(release=1)
        yield device
    finally:
        device.stop()
        shutil.rmtree(device.folder, ignore_errors=True)


def wheel_with(folder: Path, path: str, text: str) -> Path:
    """Return edgert's wheel with `text` at the end of one file."""
    wheel = own_wheel()
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as out:
        for name in source.namelist():
            out.writestr(name, source.read(name) + (text.encode() if name == path else b""))
    return folder / wheel.name


def release_of(number: int, wheel: bytes, device: Device, **changes: Any) -> RuntimeRelease:
    """Return a release of the runtime for `device` of this wheel; `changes` are of its target."""
    digest = hashlib.sha256(wheel).hexdigest()
    machine = read_config(device.state).machine
    wheels = (Wheel(WHEEL, len(wheel), 4 * len(wheel), digest),)
    target = RuntimeTarget(digest[:16], PYTHON, machine, "2.17", ("null",), (), wheels)
    return RuntimeRelease(number, "0", (replace(target, **changes),))


def stand_in_home(home: Path) -> Path:
    """Make a HOME with a stand-in runtime: its Python does nothing, its edgertd is a stand-in."""
    venv = home / "venvs" / FIRST
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"include-system-site-packages = false\nversion = {PYTHON}.0\n")
    (venv / ".complete").write_text(
        json.dumps({"edgert": "0", "engines": ["null"], "wheels": {"old-1-py3-none-any.whl": "0"}})
    )
    for name, text in (("python", "#!/bin/sh\nexit 0\n"), ("edgertd", STAND_IN)):
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
    (home / "runtime.sh").write_bytes(script_text())
    (home / "venv").symlink_to(f"venvs/{FIRST}")
    return home
