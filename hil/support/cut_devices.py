"""Devices whose power the tests cut: an emulated machine, or an ext4 on this machine's own kernel.

Both answer through `on_device/slots_agent.py` and keep their state on a `LossyDisk`, which survives the cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from edgert.bundle.signing import SigningKey, write_key_pair
from edgert.config import read_config
from edgert.versions.boot_clock import BOOT_ID_VARIABLE
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from edgert_deploy.devices.transports import PutOptions, open_transport
from hil.support import containers, images, machines, mounted
from hil.support.containers import running_container
from hil.support.disk import LossyDisk
from hil.support.dut import Dut, reached
from hil.support.host import Host
from hil.support.machines import Machine
from tests.support.bundles import make_null_bundle
from tests.support.devices import Device
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port

ARCH, PROFILE, NAME, MODEL = "amd64", "generic-x86-64", "cut-device", "echo"
AGENT_PORT, AGENT = 7777, "/opt/rig"
SOCKET = "/run/edgert/edgert.sock"
DISK_BYTES = 48 * 1024**2
ANSWER_S_MAX = 900.0
QUICK_S_MAX = 60.0

# systemd starts the agent after a boot, too.
_AGENT_UNIT = f"""\
[Service]
Environment=PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={AGENT}
ExecStart=/opt/edgert/venv/bin/python {AGENT}/slots_agent.py {AGENT_PORT} {AGENT}/key.pem {images.STATE} {SOCKET}
[Install]
WantedBy=multi-user.target
"""


class Agent:
    """A connection to `on_device/slots_agent.py`."""

    def __init__(self, port: int) -> None:
        until = time.monotonic() + ANSWER_S_MAX
        while True:
            try:
                self._link, self._data = socket.create_connection(("127.0.0.1", port), 5), b""
                self.ask("slots", within_s=20.0)  # qemu accepts the connection before the machine does
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def ask(self, do: str, within_s: float = ANSWER_S_MAX, **words: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises OSError if none comes."""
        self.send(do, **words)
        answer = self.answer(within_s)
        if answer is None:
            raise TimeoutError(f"no answer to {do} within {within_s:.0f} s")
        return answer

    def must(self, do: str, **words: Any) -> dict[str, Any]:
        answer = self.ask(do, **words)
        if "error" in answer:
            raise RuntimeError(f"{do} {words}: {answer['error']}")
        return answer

    def send(self, do: str, **words: Any) -> None:
        self._link.sendall(json.dumps({"do": do, **words}).encode() + b"\n")

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """Return the next line, or None if none came in time. Raises OSError if the connection is dead."""
        until = time.monotonic() + within_s
        while b"\n" not in self._data:
            if not select.select([self._link], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = self._link.recv(65536)
            if not more:
                raise ConnectionError("the agent closed the connection")
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        self._link.close()


class CutDevice(Protocol):
    """A device with a daemon and an agent whose power can be cut. `disk` survives the cut.

    `key` signs the channel that it follows; None if it follows none.
    """

    disk: LossyDisk
    key: SigningKey | None

    def on(self, boot: str, *, cold: bool) -> Agent:
        """Start with the disk as it is; return the agent.

        `boot` is the boot id; `cold` boots for real, if possible.
        """
        ...

    def off(self) -> None:
        """Cut the power at once; nothing more reaches the disk."""
        ...


class EmulatedDevice:
    """An emulated machine. Unless `cold`, it resumes from a state saved before its state disk was mounted."""

    def __init__(self, folder: Path) -> None:
        self.key: SigningKey | None = None
        changes, state = _bootstrapped(folder)
        self.disk = LossyDisk(folder / "disk", mounted.ext4(folder / "ext4", state, DISK_BYTES, images.DATA_LABEL))
        image = images.image_over(folder / "image", ARCH, changes)
        drive = ("-drive", f"if=none,id=data,file={self.disk.url},format=raw,cache=writeback")
        words = (*drive, "-device", "virtio-blk-pci,drive=data")
        self._machine = Machine(folder, ARCH, words, forwarded=AGENT_PORT, image=image)
        self._memory = folder / "memory"
        self._machine.on()
        Agent(self._machine.forward_port).close()
        self._machine.sh(f"systemctl stop edgertd && umount {images.STATE} && sync")
        self._machine.save(self._memory)

    def on(self, boot: str, *, cold: bool) -> Agent:
        if cold:
            self._machine.start(keep=False)
            self._machine.wait_for_ssh()
        else:
            self._machine.resume(self._memory)
        return Agent(self._machine.forward_port)

    def off(self) -> None:
        self._machine.off()
        self.disk.struck.set()


class LocalDevice:
    """This machine's kernel with an ext4 on a loop device over a lossy disk.

    A cut stops the disk, kills every process that uses it and mounts it again: the page cache is lost, as in a machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mount = folder, folder / "state"
        device = Device(folder / "made")
        device.prepare()
        device.state.config.write_text(f'device = "{NAME}"\nprofile = "{PROFILE}"\n')
        self.key: SigningKey | None = device.key
        self._key_file = folder / "key.pem"
        write_key_pair(device.key, self._key_file, folder / "public.pem")
        for release in (1, 2):
            bundle = device.bundle(release=release, profile=PROFILE, op="copy" if release % 2 else "sum")
            install(bundle, device.state, read_config(device.state))
            store = SlotStore(device.state.models / MODEL)
            store.activate(QUICK_S_MAX)
            store.mark_good()
        self.disk = LossyDisk(folder / "disk", mounted.ext4(folder / "ext4", device.state.root, DISK_BYTES))
        self._mounted = mounted.MountedDisk(folder, self.disk, self._mount, DISK_BYTES)
        self._boot = ""

    def on(self, boot: str, *, cold: bool) -> Agent:
        self._boot = boot
        self._mounted.on()
        environment = {**os.environ, BOOT_ID_VARIABLE: boot, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'deploy'}"}
        port = free_port()
        agent = [str(ROOT / "hil/on_device/slots_agent.py"), str(port), str(self._key_file), str(self._mount)]
        with (self._folder / "log").open("ab") as log:
            for words in (
                ["-m", "edgert.cli", "--state", str(self._mount), "serve"],
                [*agent, str(self._mount / "edgert.sock")],
            ):
                subprocess.Popen(
                    [sys.executable, *words], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        return Agent(port)

    def off(self) -> None:
        self.disk.struck.set()
        for pid in self._processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self._mounted.off()

    def _processes(self) -> list[int]:
        """Return the daemon, workers and agent that were started with this boot id."""
        found, mark = [], f"{BOOT_ID_VARIABLE}={self._boot}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


# name: (class, why it cannot run here)
CUT_DEVICES: dict[str, tuple[Callable[[Path], CutDevice], Callable[[], str]]] = {
    "machine": (EmulatedDevice, lambda: machines.why_not(ARCH) or containers.why_not()),
    "local": (LocalDevice, mounted.why_not),
}


def _bootstrapped(folder: Path) -> tuple[Path, Path]:
    """Bootstrap a container as a user does, with two releases; return its changes and its state folder.

    On the emulated machine itself it would take a quarter of an hour.
    """
    with running_container(folder / "made") as container:
        host = Host(folder / "host")
        host.edgert("keys", "new")
        host.add(reached(Dut(NAME, PROFILE), container))
        host.edgert("bootstrap", NAME, "--engines", "null")
        for release in (1, 2):
            bundle = make_null_bundle(folder, host.key, MODEL, release, PROFILE, op="copy" if release % 2 else "sum")
            host.edgert("deploy", bundle, NAME)
        transport = open_transport(host.device(NAME))
        transport.put(ROOT / "hil/on_device/slots_agent.py", f"{AGENT}/slots_agent.py")
        transport.put(ROOT / "tests/support/bundles.py", f"{AGENT}/tests/support/bundles.py")
        transport.put(host.folder / "keys/default.key.pem", f"{AGENT}/key.pem", PutOptions(mode=0o600))
        transport.close()
        unit = container.root / "etc/systemd/system/slots-agent.service"
        unit.write_text(_AGENT_UNIT)
        host.on(NAME, "sh", "-c", "systemctl enable slots-agent && systemctl stop edgertd && sync")
        state = folder / "state"
        mounted.run("cp", "-a", str(container.root / images.STATE[1:]), str(state))
        shutil.rmtree(container.root / images.STATE[1:])
        (container.root / images.STATE[1:]).mkdir()
    return folder / "made/upper", state
