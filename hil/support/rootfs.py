"""Root filesystems and kernels of virtual devices, built from Debian packages and kept in a cache folder.

A filesystem is built once per recipe (suite, processor, packages) and is only read afterwards. A container puts an
overlay over it; an emulated machine gets a copy. You may remove the cache: $EDGERT_HIL_CACHE, else ~/.cache/edgert-hil.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from io import FileIO
from pathlib import Path

from edgert.durable import locked
from edgert.errors import ConfigInvalid

SUITE = "bookworm"
# The packages of a fresh board: systemd, SSH, Python with venv. No compiler, no pip.
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "udev", "openssh-server", "openssh-sftp-server", "python3",
    "python3-venv", "iproute2", "iputils-ping", "sudo", "procps", "netbase", "e2fsprogs", "kmod", "libgomp1",
    "busybox-static",
)  # fmt: skip
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
USER = "pi"  # a user without root rights who may log in
RECIPE = "1"  # raise it when the steps below change
BUILD_S_MAX = 1800.0
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Debian's name of an architecture: the name that `uname -m` prints
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
BINFMT = Path("/proc/sys/fs/binfmt_misc")


def cache_folder() -> Path:
    named = os.environ.get("EDGERT_HIL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "edgert-hil"


def why_not(arch: str = "amd64") -> str:
    """Return the reason why no root filesystem can be built here, or "" if one exists or can be built."""
    if os.geteuid() != 0:
        return "only root can make root filesystems"
    if _folder("rootfs", arch, PACKAGES).is_dir():
        return ""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed: apt-get install mmdebstrap"
    if not KEYRING.exists():
        return "Debian's archive keys are not installed: apt-get install debian-archive-keyring"
    return _why_not_foreign(arch)


def rootfs(arch: str = "amd64") -> Path:
    """Return the folder of the root filesystem; build it if needed. Raises ConfigInvalid."""
    if reason := why_not(arch):
        raise ConfigInvalid(reason)
    foreign = MACHINES[arch] != platform.machine()
    return _built(
        _folder("rootfs", arch, PACKAGES),
        [
            "--variant=apt",
            *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
            f'--customize-hook=chroot "$1" useradd --create-home --shell /bin/bash {USER}',
            '--customize-hook=rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/machine-id "$1"/etc/hostname "$1"/etc/resolv.conf',
            '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*',
        ],
        arch,
        PACKAGES,
        f"building a root filesystem of {SUITE} for {arch} ({'about six minutes' if foreign else 'about a minute'}, once)",
    )


def kernel(arch: str) -> Path:
    """Return a folder with `boot/vmlinuz-*` and `lib/modules/*`, unpacked only. Raises ConfigInvalid."""
    packages = (f"linux-image-cloud-{arch}",)
    folder = _folder("kernel", arch, packages)
    return _built(folder, ["--variant=extract"], arch, packages, f"fetching a kernel for {arch}")


def _built(folder: Path, options: list[str], arch: str, packages: tuple[str, ...], doing: str) -> Path:
    with only_one(folder):
        if folder.is_dir():
            return folder
        print(doing, file=sys.stderr)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        mirror = os.environ.get("EDGERT_HIL_MIRROR")
        command = [
            "mmdebstrap", f"--arch={arch}", f"--include={','.join(packages)}", f"--keyring={KEYRING}",
            '--aptopt=Apt::Install-Recommends "false"', *options, SUITE, str(partial), *([mirror] if mirror else []),
        ]  # fmt: skip
        # The emulator's default processor offers features that it computes wrongly.
        environment = {**os.environ, "QEMU_CPU": "cortex-a72", "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_S_MAX, env=environment
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.strip().splitlines()[-4:])
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigInvalid(
                f"mmdebstrap failed: {said[-600:]}. Check that a Debian mirror can be reached; $EDGERT_HIL_MIRROR names one"
            )
        partial.rename(folder)
    return folder


def personalise(root: Path, name: str, keys: Path) -> None:
    """Give the system at `root` a name, a machine id, and the keys in `keys` (host_key, client_key.pub)."""
    (root / "etc/hostname").write_text(f"{name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost {name}\n::1 localhost\n")
    (root / "etc/machine-id").write_text(os.urandom(16).hex() + "\n")
    for kind in ("", ".pub"):
        there = root / f"etc/ssh/ssh_host_ed25519_key{kind}"
        shutil.copyfile(keys / f"host_key{kind}", there)
        there.chmod(0o644 if kind else 0o600)
    for home, owner in ((root / "root", 0), (root / "home" / USER, (root / "home" / USER).stat().st_uid)):
        folder = home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(keys / "client_key.pub", folder / "authorized_keys")
        for path in (folder, folder / "authorized_keys"):
            os.chown(path, owner, owner)


def only_one(made: Path) -> FileIO:
    """Lock the folder `made` in the cache, after every other process that builds it."""
    made.parent.mkdir(parents=True, exist_ok=True)
    return locked(made.with_name(made.name + ".lock"), BUILD_S_MAX)


def _folder(what: str, arch: str, packages: tuple[str, ...]) -> Path:
    if arch not in MACHINES:
        raise ConfigInvalid(f"no root filesystem is known for {arch!r}; known: {', '.join(MACHINES)}")
    digest = hashlib.sha256("\n".join([RECIPE, SUITE, *LEFT_OUT, *packages]).encode()).hexdigest()[:8]
    return cache_folder() / f"{what}-{SUITE}-{arch}-{digest}"


def _why_not_foreign(arch: str) -> str:
    """Return the reason why packages of another processor cannot be installed here.

    Their scripts need its user-mode emulator, registered with the kernel.
    """
    machine = MACHINES[arch]
    if machine == platform.machine():
        return ""
    for program, package in ((f"qemu-{machine}-static", "qemu-user-static"), ("arch-test", "arch-test")):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install {package}"
    registered = BINFMT / f"qemu-{machine}"
    if not registered.exists():
        with contextlib.suppress(OSError):
            subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], capture_output=True)
            recipe = Path(f"/usr/lib/binfmt.d/qemu-{machine}.conf").read_text()
            (BINFMT / "register").write_text(recipe.strip())
    return "" if registered.exists() else f"the kernel cannot start {machine} programs: register qemu with binfmt_misc"
