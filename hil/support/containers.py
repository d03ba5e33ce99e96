"""Virtual devices with a real systemd and sshd: systemd-nspawn over one shared root filesystem.

Each container has a network namespace with one link to this host, a cgroup, and an overlay for its changes. It starts
in about a second. It shares this machine's kernel, clock and page cache: a power cut ends its processes at once and
loses no written data. `machines.py` has devices that do lose data.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgert.errors import ConfigInvalid
from hil.support import rootfs
from hil.support.keys import HasKeys, greets, new_keys

START_S_MAX = 240.0
LOGIN_S_MAX = 240.0  # PAM waits up to two minutes for systemd-logind
STOP_S_MAX = 120.0
NUMBERS_MAX = 4096
CGROUPS = Path("/sys/fs/cgroup")
REBOOT = 133  # exit code of systemd-nspawn when the system inside reboots
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
INSTANCES_WANTED = 1024  # inotify instances: systemd needs five; the kernel's default is 128
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return the reason why no container can run here, or "" if one can."""
    if reason := rootfs.why_not(_arch()):
        return reason
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install {package}"
    name = f"edgert-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return "this root user may not make network namespaces"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    if not any(os.access(folder / "cgroup.procs", os.W_OK) for folder in _hierarchies()):
        return "this root user may not make control groups"
    return ""


class _Limit(NamedTuple):
    """The files of a control group with the use of a resource and its limit, and the value for no limit."""

    used: str
    most: str
    none: str


_LIMITS = {
    "memory": _Limit("memory.usage_in_bytes", "memory.limit_in_bytes", "-1"),
    "pids": _Limit("pids.current", "pids.max", "max"),
}


class Container(HasKeys):
    """One device, which is its own power switch. It starts from the overlays `below` of ended containers.

    `folder` holds everything that it writes; `client_key` may log in as root and as `pi`.
    """

    def __init__(self, folder: Path, below: tuple[Path, ...] = ()) -> None:
        self.folder = folder
        self._lower = (*(path / "upper" for path in below), rootfs.rootfs(_arch()))
        _remove_abandoned()
        number, self._claim = _claim_number()
        self.name = _name(number)
        self._process: subprocess.Popen[bytes] | None = None
        self._runner: threading.Thread | None = None
        self._wanted = False
        high, low = divmod(2 * number, 256)
        self._host_ip, self.ip = f"10.213.{high}.{low}", f"10.213.{high}.{low + 1}"

    # --- the device under test ----------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"root@{self.ip}"

    @property
    def keys(self) -> Path:
        return self.folder

    @property
    def host_ip(self) -> str:
        """Return the address of this host on the device's link."""
        return self._host_ip

    @property
    def root(self) -> Path:
        """Return the device's root folder."""
        return self.folder / "root"

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    # --- power --------------------------------------------------------------------------------

    def on(self) -> None:
        """Start, and wait until a user can log in. Raises ConfigInvalid with the end of the console log."""
        self._wanted = True
        self._runner = threading.Thread(target=self._keep_running, name=self.name, daemon=True)
        self._runner.start()
        self.wait_for_ssh()
        self._log_in()

    def off(self) -> None:
        """End every process at once, like a pulled plug."""
        self._wanted = False
        until = time.monotonic() + STOP_S_MAX
        while self._runner is not None and self._runner.is_alive():
            self._kill_init()
            self._runner.join(0.05)
            if time.monotonic() > until:
                raise ConfigInvalid(f"{self.name} did not end within {STOP_S_MAX:.0f} s: {self.console[-1000:]}")

    def cycle(self) -> None:
        self.off()
        self.on()

    # --- its link -----------------------------------------------------------------------------

    def link(self, up: bool) -> None:
        """Cut or restore the network link; packets from this host vanish without an error."""
        _ip("-n", self.name, "link", "set", "eth0", "up" if up else "down")
        if up:  # the kernel dropped the route with the link, and this host may remember that nobody answered
            _ip("-n", self.name, "route", "replace", "default", "via", self._host_ip)
            _ip("neigh", "flush", "to", self.ip)

    def allow_only(self, port: int) -> None:
        """Let the device reach one TCP port of this host and nothing else, and take no connection."""
        there = ("-p", "tcp", "--dport", str(port))
        for words in (
            ("-P", "INPUT", "DROP"),
            ("-P", "OUTPUT", "DROP"),
            ("-A", "INPUT", "-i", "lo", "-j", "ACCEPT"),
            ("-A", "OUTPUT", "-o", "lo", "-j", "ACCEPT"),
            ("-A", "OUTPUT", "-d", self._host_ip, *there, "-j", "ACCEPT"),
            ("-A", "INPUT", "-s", self._host_ip, "-p", "tcp", "--sport", str(port), "!", "--syn", "-j", "ACCEPT"),
        ):
            self._iptables(*words)

    def spoil(self, kbit_s: int, loss: float) -> None:
        """Limit the rate of the link in both directions, and drop that share of the packets to the device."""
        words = ("root", "tbf", "rate", f"{kbit_s}kbit", "burst", "16kb", "latency", "400ms")
        for where, device in ((("-n", self.name), "eth0"), ((), self.name)):
            _run("tc", *where, "qdisc", "replace", "dev", device, *words)
        self._iptables("-I", "INPUT", "-m", "statistic", "--mode", "random", "--probability", str(loss), "-j", "DROP")

    def _iptables(self, *words: str) -> None:
        _run("ip", "netns", "exec", self.name, "iptables", *words)

    # --- life ---------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the overlay, the keys and the network link. Raises ConfigInvalid."""
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            (self.folder / name).chmod(0o755)  # it becomes the device's `/`, which all its users must enter
        self._mount()
        new_keys(self.keys)
        rootfs.personalise(self.root, self.name, self.folder)
        (self.root / "etc/resolv.conf").unlink(missing_ok=True)
        _ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self._host_ip}/31", "dev", self.name)
        _ip("link", "set", self.name, "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.ip}/31", "dev", "eth0")):
            _ip("-n", self.name, *words)
        self.link(up=True)

    def remove(self) -> None:
        """End the container and keep only `folder/upper`."""
        with contextlib.suppress(ConfigInvalid):
            self.off()
        _remove(self.name)
        self._claim.close()

    @contextlib.contextmanager
    def bounded(self, service: str, resource: str, more: int) -> Iterator[Path]:
        """Let a service have at most `more` bytes of "memory", or processes ("pids"), beyond the present.

        The kernel's control groups hold this, as for MemoryMax and TasksMax of the unit. Returns the group's folder.
        """
        (running,) = (CGROUPS / "systemd" / self.name).rglob(f"{service}/cgroup.procs")
        group, limit = CGROUPS / resource / f"{self.name}-{service}", _LIMITS[resource]
        group.mkdir()
        try:
            for pid in running.read_text().split():
                (group / "cgroup.procs").write_text(pid)
            used = int((group / limit.used).read_text())
            (group / limit.most).write_text(str(used + more))
            yield group
        finally:
            (group / limit.most).write_text(limit.none)
            while pids := (group / "cgroup.procs").read_text().split():
                for pid in pids:
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        (CGROUPS / resource / "cgroup.procs").write_text(pid)
            group.rmdir()

    def wait_for_ssh(self) -> None:
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until:
            if greets(self.ip, 22, 1):
                return
            if self._runner is not None and not self._runner.is_alive():
                break
            time.sleep(0.05)
        raise ConfigInvalid(f"{self.name} does not answer over SSH; its console: {self.console[-2000:]}")

    def _log_in(self) -> None:
        """Open a first session: it starts the services of the user, which takes long on a busy machine."""
        command = [
            "ssh", "-i", str(self.client_key), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", self.address, "true",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOGIN_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise ConfigInvalid(
                f"{self.name} opened no session within {LOGIN_S_MAX:.0f} s; its console: {self.console[-2000:]}"
            ) from None
        if done.returncode != 0:
            raise ConfigInvalid(f"{self.name} refuses the login: {done.stderr.strip()[-500:]}")

    def _mount(self) -> None:
        lower = ":".join(map(str, self._lower))
        for name in ("upper", "work"):
            os.chown(self.folder / name, 0, 0)
        words = f"lowerdir={lower},upperdir={self.folder}/upper,workdir={self.folder}/work"
        done = subprocess.run(
            ["mount", "-t", "overlay", self.name, "-o", words, self.root], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ConfigInvalid(
                f"cannot mount an overlay in {self.folder}: {done.stderr.strip()}. If the folder is on an overlay itself, "
                "as in a Docker container, set TMPDIR to a folder on a volume or a tmpfs"
            )

    def _keep_running(self) -> None:
        while self._wanted:
            with (self.folder / "console.log").open("ab") as console:
                # The child ends with this thread, so a killed test run leaves no device behind.
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                if self._process.wait() != REBOOT:
                    return

    def _command(self) -> list[str]:
        folders = [str(hierarchy / self.name) for hierarchy in _hierarchies()]
        nspawn = [
            "systemd-nspawn", "--quiet", f"--directory={self.root}", f"--machine={self.name}", "--boot", "--register=no",
            "--keep-unit", f"--network-namespace-path=/run/netns/{self.name}", "--console=pipe", "--resolv-conf=off",
            "--link-journal=no", "--kill-signal=SIGRTMIN+3",
        ]  # fmt: skip
        # Without its own cgroup every unit inside would fail with EIO.
        enter = 'for d in $1; do mkdir -p "$d" && echo $$ >"$d/cgroup.procs" || exit 1; done; shift; exec "$@"'
        return ["sh", "-c", enter, "sh", " ".join(folders), *nspawn]

    def _kill_init(self) -> None:
        """Kill the system's first process, which ends all others."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            if not children:
                process.kill()


@contextlib.contextmanager
def running_container(folder: Path, below: tuple[Path, ...] = ()) -> Iterator[Container]:
    """Make a device in `folder`, start it, and remove it afterwards. Raises ConfigInvalid."""
    _allow_inotify()
    container = Container(folder, below)
    try:
        container.make()
        container.on()
        yield container
    finally:
        container.remove()


def _arch() -> str:
    return next((arch for arch, machine in rootfs.MACHINES.items() if machine == platform.machine()), "amd64")


def _hierarchies() -> list[Path]:
    """Return the cgroup hierarchies that a process joins: version 2, or version 1 and systemd's own."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [folder for folder in (CGROUPS / "systemd", CGROUPS / "unified") if folder.is_dir()]


def _claim_number() -> tuple[int, socket.socket]:
    """Return a number that no other container has, and its claim, which ends with this process."""
    for number in range(NUMBERS_MAX):
        if (claim := _claimed(number)) is None:
            continue
        done = subprocess.run(["ip", "netns", "add", _name(number)], capture_output=True, text=True)
        if done.returncode == 0:
            return number, claim
        claim.close()
        if "File exists" not in done.stderr:
            raise ConfigInvalid(f"cannot make a network namespace: {done.stderr.strip()}")
    raise ConfigInvalid(f"{NUMBERS_MAX} virtual devices exist already; `ip netns list` shows them")


def _claimed(number: int) -> socket.socket | None:
    """Claim `number` by a socket's name, which the kernel frees with this process; None if taken."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{_name(number)}")
    except OSError:
        claim.close()
        return None
    return claim


def _remove_abandoned() -> None:
    """Remove what killed test runs left: their processes ended with them, their mounts and links did not."""
    for namespace in Path("/run/netns").glob("edgert-*"):
        number = namespace.name.partition("-")[2]
        if not number.isdecimal() or (claim := _claimed(int(number))) is None:
            continue
        with claim:
            groups = [path for each in _hierarchies() for path in (each / namespace.name).rglob("cgroup.procs")]
            if not any(path.read_text() for path in groups):
                _remove(namespace.name)


def _remove(name: str) -> None:
    """Remove the overlay, the link, the network namespace and the control groups of an ended container."""
    subprocess.run(["umount", "--lazy", name], capture_output=True)  # pytest may have renamed the folder above it
    # The link would vanish a moment after its namespace, when another container may have the number.
    subprocess.run(["ip", "link", "delete", name], capture_output=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _name(number: int) -> str:
    """Return the name of a container, its overlay, namespace, link here and control groups."""
    return f"edgert-{number}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigInvalid(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _allow_inotify() -> None:
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    with contextlib.suppress(OSError):
        if int(limit.read_text()) < INSTANCES_WANTED:
            limit.write_text(str(INSTANCES_WANTED))


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
