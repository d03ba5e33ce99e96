"""Disk images for emulated machines: a root filesystem, a kernel and an initrd, built without a boot.

The image holds the system of `rootfs.py`, the kernel's modules, DHCP on its one link, and the keys beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import ConfigInvalid
from hil.support import rootfs
from hil.support.keys import new_keys

RECIPE = "2"
SIZE = "4G"  # sparse
DATA_LABEL = "edgert-data"  # a second disk with this label is mounted as the state folder
STATE = "/var/lib/edgert"
NAME = "edgert-machine"
PROGRAMS = {"mke2fs": "e2fsprogs", "depmod": "kmod", "modprobe": "kmod", "cpio": "cpio", "ssh-keygen": "openssh-client"}
MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "ext4")
KEPT_MODULES = ("net", "drivers/virtio", "drivers/block", "drivers/net", "drivers/char", "drivers/nvme", "fs", "lib", "crypto",
                "arch")  # fmt: skip
# Units that only cost time on an emulated processor.
MASKED = (
    "systemd-timesyncd.service", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
    "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer", "getty@tty1.service", "serial-getty@ttyAMA0.service",
    "serial-getty@ttyS0.service", "systemd-networkd-wait-online.service", "systemd-binfmt.service",
)  # fmt: skip
_NETWORK = "[Match]\nName=en* eth*\n[Network]\nDHCP=yes\n[DHCPv4]\nUseDNS=no\n"
_FSTAB = "/dev/vda / ext4 rw,noatime 0 1\n"
_FSTAB_DATA = f"LABEL={DATA_LABEL} {STATE} ext4 rw,noatime 0 2\n"
_INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /newroot
/bin/busybox mount -t proc proc /proc; /bin/busybox mount -t sysfs sys /sys; /bin/busybox mount -t devtmpfs dev /dev
while read -r m; do /bin/busybox insmod /modules/$m; done < /order
n=0; while [ ! -b /dev/vda ] && [ $n -lt 200 ]; do /bin/busybox sleep 0.05; n=$((n+1)); done
/bin/busybox mount -t ext4 -o rw /dev/vda /newroot || { echo EDGERT: no root; exec /bin/busybox sh; }
/bin/busybox mount --move /dev /newroot/dev; /bin/busybox umount /sys; /bin/busybox umount /proc
exec /bin/busybox switch_root /newroot /lib/systemd/systemd
"""


@dataclass(frozen=True)
class Image:
    """An image to start a machine from. The disk is read-only; each machine writes to its own overlay."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "root.img"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def keys(self) -> Path:
        """Return the folder of host_key and of client_key, which may log in as root and as `pi`."""
        return self.folder


def why_not(arch: str) -> str:
    """Return the reason why no image can be made here, or "" if one can."""
    if reason := rootfs.why_not(arch):
        return reason
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install {package}"
    return ""


def image(arch: str) -> Image:
    """Return the image for `arch`; build it if needed. Raises ConfigInvalid."""
    if reason := why_not(arch):
        raise ConfigInvalid(reason)
    below, kernel = rootfs.rootfs(arch), rootfs.kernel(arch)
    folder = rootfs.cache_folder() / f"image-{below.name}-{RECIPE}"
    with rootfs.only_one(folder):
        if not folder.is_dir():
            print(f"making a disk image for {arch}", file=sys.stderr)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _make(partial, (below,), kernel)
            partial.rename(folder)
    return Image(folder)


def image_over(folder: Path, arch: str, changes: Path) -> Image:
    """Make an image of the system with an ended container's `changes`, and a second disk for its state.

    Raises ConfigInvalid.
    """
    folder.mkdir()
    _make(folder, (changes, rootfs.rootfs(arch)), rootfs.kernel(arch), _FSTAB + _FSTAB_DATA)
    return Image(folder)


def _make(out: Path, layers: tuple[Path, ...], kernel: Path, fstab: str = _FSTAB) -> None:
    new_keys(out)
    release = next((kernel / "lib/modules").iterdir()).name
    shutil.copyfile(next((kernel / "boot").glob("vmlinuz-*")), out / "vmlinuz")
    _run("depmod", "-b", str(kernel), release)
    _make_initrd(out / "initrd", layers[-1], kernel, release)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        upper, work, root = (Path(scratch) / name for name in ("upper", "work", "root"))
        for path in (upper, work, root):
            path.mkdir()
        words = f"lowerdir={':'.join(map(str, layers))},upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", words, str(root))
        try:
            _fill(root, out, fstab, kernel / "lib/modules" / release)
            (out / "root.img").touch()
            _run("truncate", "--size", SIZE, str(out / "root.img"))
            _run("mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", "-L", "root", "-d", str(root), "-F", str(out / "root.img"))  # fmt: skip
        finally:
            _run("umount", str(root))


def _fill(root: Path, keys: Path, fstab: str, modules: Path) -> None:
    rootfs.personalise(root, NAME, keys)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/fstab").write_text(fstab)
    (root / "etc/systemd/network/20-wired.network").write_text(_NETWORK)
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    _link(units / "multi-user.target.wants/systemd-networkd.service", "/lib/systemd/system/systemd-networkd.service")
    for unit in MASKED:
        _link(units / unit, "/dev/null")
    there = root / "lib/modules" / modules.name
    there.mkdir(parents=True, exist_ok=True)
    for index in modules.glob("modules.*"):
        shutil.copyfile(index, there / index.name)
    for kept in KEPT_MODULES:
        if (modules / "kernel" / kept).is_dir():
            shutil.copytree(modules / "kernel" / kept, there / "kernel" / kept, dirs_exist_ok=True)


def _make_initrd(out: Path, below: Path, kernel: Path, release: str) -> None:
    """Make an initrd with a static shell that loads the modules of the root disk and starts systemd."""
    listed: dict[str, None] = {}
    for module in MODULES:
        words = ("modprobe", "-d", str(kernel), "-S", release, "--show-depends", module)
        for line in _run(*words).stdout.splitlines():
            if line.startswith("insmod "):
                listed[line.split()[1]] = None
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for name in ("bin", "dev", "proc", "sys", "newroot", "modules"):
            (tree / name).mkdir()
        shutil.copy(below / "bin/busybox", tree / "bin/busybox")
        (tree / "bin/sh").symlink_to("busybox")
        for path in listed:
            shutil.copy(path, tree / "modules")
        (tree / "order").write_text("".join(f"{Path(path).name}\n" for path in listed))
        (tree / "init").write_text(_INIT)
        (tree / "init").chmod(0o755)
        script = 'cd "$1" && find . | cpio --quiet -o -H newc | gzip -1 >"$2"'
        _run("sh", "-c", script, "sh", str(tree), str(out))


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise ConfigInvalid(f"`{words[0]}` failed: {done.stderr.strip()[-600:]}")
    return done
