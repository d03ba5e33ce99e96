"""Emulated machines with their own kernel: a power cut really loses data that was not written to the disk.

qemu-system emulates the whole processor (a Cortex-A72 as in a Raspberry Pi 4, or x86-64) and runs Debian with systemd
and sshd. Emulation is slow: these machines prove correctness, never speed. The machine reaches this host and nothing
else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgert.errors import ConfigInvalid
from hil.support import images
from hil.support.keys import HasKeys, greets
from tests.support.servers.ports import free_port

START_S_MAX = 400.0  # for an emulated processor on a busy machine
QUICK_S_MAX = 60.0
GREETING_S_MAX = 20.0
MEMORY_MB = 2048
PROCESSORS = 2
ARGUMENTS = "quiet loglevel=3 net.ifnames=0 systemd.show_status=0 audit=0 mitigations=off random.trust_cpu=on panic=5"
# arch: (program, Debian's package, machine and processor, console)
EMULATORS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "arm64": ("qemu-system-aarch64", "qemu-system-arm", ("-M", "virt", "-cpu", "cortex-a72"), "ttyAMA0"),
    "amd64": ("qemu-system-x86_64", "qemu-system-x86", ("-M", "q35", "-cpu", "Nehalem"), "ttyS0"),
}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not(arch: str) -> str:
    """Return the reason why no such machine can run here, or "" if one can."""
    program, package, _, _ = EMULATORS[arch]
    for name, where in ((program, package), ("qemu-img", "qemu-utils")):
        if shutil.which(name) is None:
            return f"{name} is not installed: apt-get install {where}"
    return images.why_not(arch)


class Machine(HasKeys):
    """One machine, which is also its own power switch. It writes to `folder`.

    `more` are further options of qemu. `forwarded` is another port of the machine, reachable at `forward_port`.
    The disk's writes go to this host's page cache, which outlives qemu. A power cut therefore loses the data in the
    machine's own memory, as with a disk without a cache.
    """

    def __init__(
        self,
        folder: Path,
        arch: str,
        more: Sequence[str] = (),
        forwarded: int = 0,
        image: images.Image | None = None,
    ) -> None:
        self.folder, self.arch, self._more, self._forwarded = folder, arch, tuple(more), forwarded
        self.image = image or images.image(arch)
        self.port, self.forward_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"root@127.0.0.1:{self.port}"

    @property
    def keys(self) -> Path:
        return self.image.keys

    @property
    def disk(self) -> Path:
        return self.folder / "root.qcow2"

    @property
    def monitor(self) -> Path:
        return self.folder / "monitor"

    @property
    def console(self) -> str:
        log = self.folder / "console.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def on(self) -> None:
        """Start, and wait until SSH answers. Raises ConfigInvalid with the end of the console log."""
        self.start()
        self.wait_for_ssh()
        self.sh("systemctl is-system-running --wait || true")  # until the boot is over, everything is slow

    def sh(self, script: str) -> None:
        """Run a script as root, waiting until the machine accepts logins. Raises ConfigInvalid."""
        never = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")  # our own machine, on loopback
        options = (*never, "-o", "LogLevel=ERROR", "-o", f"ConnectTimeout={START_S_MAX:.0f}")
        _run("ssh", "-i", str(self.client_key), "-p", str(self.port), *options, "root@127.0.0.1", script)

    def save(self, memory: Path) -> None:
        """Write the machine's memory to a file and end it; `resume` continues from there any number of times."""
        said = self.tell("stop", f'migrate "exec:cat >{memory}"', "info migrate")
        if "completed" not in said:
            raise ConfigInvalid(f"qemu could not save the machine: {said}")
        self.off()

    def resume(self, memory: Path) -> None:
        """Continue from the state that `save` wrote, in under a second; writes to its disk are discarded."""
        self.start(("-incoming", f"exec:cat {memory}"), keep=False)
        until = time.monotonic() + START_S_MAX
        while "inmigrate" in self.tell("info status"):
            if time.monotonic() > until:
                raise ConfigInvalid("qemu could not restore the machine's memory")
            time.sleep(0.05)
        self.tell("cont")

    def start(self, words: Sequence[str] = (), *, keep: bool = True) -> None:
        """Start qemu and wait for its monitor only."""
        self.monitor.unlink(missing_ok=True)
        if not self.disk.exists():
            _run("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(self.image.disk), "-F", "raw", str(self.disk))
        with (self.folder / "qemu.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command(keep), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        until = time.monotonic() + START_S_MAX
        while not self.monitor.exists() and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)

    def off(self) -> None:
        """Kill qemu: its processor stops between two instructions."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def cycle(self) -> None:
        self.off()
        self.on()

    def wait_for_ssh(self) -> None:
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                break
            if greets("127.0.0.1", self.port, GREETING_S_MAX):
                return
            time.sleep(0.1)
        log = (self.folder / "qemu.log").read_text(errors="replace")
        raise ConfigInvalid(f"the {self.arch} machine does not answer over SSH: {log[-1000:]} {self.console[-1000:]}")

    def tell(self, *commands: str) -> str:
        """Send commands to qemu's monitor and return the answer to the last."""
        said = ""
        until = time.monotonic() + QUICK_S_MAX
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as monitor:
            while monitor.connect_ex(os.fspath(self.monitor)):  # the socket file appears before qemu listens
                if time.monotonic() > until:
                    raise ConfigInvalid(f"qemu's monitor {self.monitor} does not answer")
                time.sleep(0.02)
            monitor.settimeout(START_S_MAX)
            _until_prompt(monitor)
            for command in commands:
                monitor.sendall(command.encode() + b"\n")
                said = _until_prompt(monitor)
        return said

    def _command(self, keep: bool) -> list[str]:
        forward = f",hostfwd=tcp:127.0.0.1:{self.forward_port}-:{self._forwarded}" if self._forwarded else ""
        forget = "" if keep else ",snapshot=on"
        program, _, machine, console = EMULATORS[self.arch]
        return [
            program, *machine, "-accel", "tcg,thread=multi,tb-size=256", "-smp", str(PROCESSORS), "-m", str(MEMORY_MB),
            "-nodefaults", "-no-user-config", "-display", "none", "-serial", f"file:{self.folder}/console.log",
            "-kernel", str(self.image.kernel), "-initrd", str(self.image.initrd),
            "-append", f"console={console} {ARGUMENTS}",
            "-drive", f"if=none,id=root,file={self.disk},format=qcow2,cache=writeback{forget}", "-device", "virtio-blk-pci,drive=root",
            "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22{forward}",
            "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci",
            "-monitor", f"unix:{self.monitor},server=on,wait=off", *self._more,
        ]  # fmt: skip


@contextlib.contextmanager
def running_machine(folder: Path, arch: str) -> Iterator[Machine]:
    """Make a machine in `folder`, start it, and end it afterwards. Raises ConfigInvalid."""
    machine = Machine(folder, arch)
    try:
        machine.on()
        yield machine
    finally:
        machine.off()


def _until_prompt(monitor: socket.socket) -> str:
    said = b""
    while not said.rstrip().endswith(b"(qemu)"):
        data = monitor.recv(65536)
        if not data:
            break
        said += data
    return said.decode(errors="replace")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigInvalid(f"`{words[0]}` failed: {done.stderr.strip()}")
