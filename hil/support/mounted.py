"""An ext4 on this machine's kernel, on a disk that loses unflushed writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from edgert.errors import ConfigInvalid
from hil.support.disk import LossyDisk

MOUNT_S_MAX = 60.0
COMMAND_S_MAX = 300
PROGRAMS = {"qemu-storage-daemon": "qemu-system-common", "losetup": "mount", "mke2fs": "e2fsprogs"}


class MountedDisk:
    """`disk` mounted at `place` through a block server and a loop device. Needs root; see `why_not`."""

    def __init__(self, folder: Path, disk: LossyDisk, place: Path, size_bytes: int) -> None:
        self._file, self._disk, self._place, self._size_bytes = folder / "disk-file", disk, place, size_bytes
        self._loop = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._file.touch()
        place.mkdir(exist_ok=True)

    def on(self) -> None:
        """Mount the disk. Raises ConfigInvalid."""
        words = ["--blockdev", f"driver=nbd,node-name=disk,server.type=unix,server.path={self._disk.path}"]
        words += ["--export", f"type=fuse,id=disk,node-name=disk,mountpoint={self._file},writable=on"]
        self._server = subprocess.Popen(["qemu-storage-daemon", *words], stdin=subprocess.DEVNULL)
        until = time.monotonic() + MOUNT_S_MAX
        while self._file.stat().st_size != self._size_bytes:
            if self._server.poll() is not None or time.monotonic() > until:
                raise ConfigInvalid("qemu-storage-daemon does not serve the disk")
            time.sleep(0.01)
        self._loop = run("losetup", "--find", "--show", str(self._file)).strip()
        run("mount", "-t", "ext4", self._loop, str(self._place))

    def off(self) -> None:
        """Detach the disk, so that nothing reaches it any more; its users have ended."""
        self._disk.struck.set()
        subprocess.run(["umount", "--lazy", self._place], capture_output=True)
        subprocess.run(["losetup", "--detach", self._loop], capture_output=True)
        if self._server is not None:
            subprocess.run(["umount", "--lazy", self._file], capture_output=True)
            self._server.kill()
            self._server.wait()
            self._server = None


def why_not() -> str:
    """Return the reason why no such disk can be mounted here, or "" if one can."""
    if os.geteuid() != 0:
        return "only root can mount file systems"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install {package}"
    return "" if Path("/dev/fuse").exists() else "the kernel has no FUSE"


def ext4(path: Path, content: Path, size_bytes: int, label: str = "") -> bytes:
    """Make a filesystem with `content` and return it."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
    owner = f"root_owner={content.stat().st_uid}:{content.stat().st_gid}"  # mke2fs -d does not copy it
    run("mke2fs", "-q", "-t", "ext4", "-E", owner, "-L", label, "-d", str(content), "-F", str(path))
    return path.read_bytes()


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S_MAX)
    if done.returncode != 0:
        raise ConfigInvalid(f"`{words[0]}` failed: {done.stderr.strip()[-600:]}")
    return done.stdout
