"""The runtime of a device whose user logs in and uses sudo: install, upgrade, rollback, power cut, removal.

test_service.py bootstraps as root and as a user without rights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgert.errors import EdgeRTError
from edgert.protocol import control
from edgert.state_dir import StateDir
from hil.support import rootfs
from hil.support.containers import Container, running_container
from hil.support.dut import Dut, reached
from hil.support.host import Host
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.trees import another_tree

PROFILE = "generic-x86-64"
NAME = "board"
TRIAL_S = "90"
COMMAND_S_MAX = 300.0

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class World:
    """One container that `host` bootstrapped. Other hosts have other versions of EdgeRT."""

    host: Host
    container: Container
    folder: Path

    before: dict[str, str]

    def sh(self, script: str) -> str:
        return self.host.on(NAME, "sh", "-c", script).stdout.strip()

    def in_use(self) -> str:
        return self.sh("basename $(readlink /opt/edgert/venv)")

    def another(self, name: str, file: str = "edgert/__init__.py", old: str = "", new: str = "") -> Host:
        """Return a host of the same user, whose EdgeRT has `new` instead of `old` in `file`. Its folder is `name`."""
        return Host(self.host.folder, another_tree(self.folder / name, file, old, new))

    def wait_until_it_serves(self) -> None:
        """Wait until the daemon answers at its socket on the container's disk, then once over SSH, which is slower."""
        wait_until(lambda: self.is_ready() and self.serves(), "it serves without an operator", pause_s=0.5)

    def is_ready(self) -> bool:
        socket = StateDir(self.container.root / "var/lib/edgert").control_socket
        try:
            models = control.ask(socket, {"op": "status"}, 60.0)["models"].values()
        except (EdgeRTError, OSError, KeyError):  # the container boots, or the runtime changes
            return False
        return [model["state"] for model in models] == ["ready"]

    def serves(self) -> bool:
        try:
            models = self.host.edgertd(NAME, "status")["models"]
        except EdgeRTError:  # the container boots, or the runtime changes
            return False
        return bool(models) and (models[0].get("serving") or {}).get("state") == "ready"


@pytest.fixture(scope="module")
def world(containers_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_container(tmp_path_factory.mktemp("device")) as container:
        host = Host(tmp_path_factory.mktemp("host"))
        host.edgert("keys", "new")
        (container.root / "etc/sudoers.d/pi").write_text(f"{rootfs.USER} ALL=(ALL) NOPASSWD: ALL\n")
        # A Python that cannot put pip into environments, like Debian's without python3-venv.
        shutil.rmtree(container.root / "usr/lib/python3.11/ensurepip")
        host.add(reached(Dut(NAME, PROFILE, sudo=True), container, rootfs.USER))
        made = World(host, container, tmp_path_factory.mktemp("trees"), everything(container.root))
        (plan,) = host.edgert("bootstrap", NAME, "--engines", "null", "--dry-run")["devices"]
        assert plan["runtime"]["action"] == "install"
        assert plan["runtime"]["send_bytes"] > 1e6
        assert everything(container.root) == made.before
        (done,) = host.edgert("bootstrap", NAME, "--engines", "null")["devices"]
        assert done["runtime"]["sent_bytes"] == plan["runtime"]["send_bytes"]
        host.edgert("deploy", make_null_bundle(host.folder, host.key, profile=PROFILE), NAME)
        yield made


# Files that other programs write at any time, and the backups that useradd keeps.
PASSING = ("proc", "sys", "dev", "run", "tmp", "var/log", "var/tmp", "var/lib/systemd", "var/lib/sudo")
COPIES = ("etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/.pwd.lock")


def everything(root: Path) -> dict[str, str]:
    """Return each file, link and folder below `root` with its kind, mode, owner and content."""
    found = {}
    for folder, names, files in os.walk(root):
        below = os.path.relpath(folder, root)
        names[:] = [name for name in names if os.path.normpath(os.path.join(below, name)) not in PASSING]
        for name in (*names, *files):
            path = Path(folder, name)
            status = path.lstat()
            said = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(status.st_mode):
                # If a file of the root filesystem changes, its time changes.
                small = status.st_size < 100_000
                said = hashlib.sha256(path.read_bytes()).hexdigest() if small else f"{status.st_mtime_ns}"
            found[os.path.normpath(os.path.join(below, name))] = (
                f"{status.st_mode:o} {status.st_uid}:{status.st_gid} {said}"
            )
    return {path: said for path, said in found.items() if path not in COPIES}


def test_an_upgrade_sends_only_changed_wheels_and_is_kept_after_its_trial(world: World) -> None:
    setting = "    strict: bool = False\n"
    newer = world.another("newer", "edgert/config.py", setting, f"{setting}    of_tomorrow: float = 0.0\n")
    before = world.in_use()
    (kept,) = newer.edgert("bootstrap", NAME, "--engines", "null")["devices"]
    assert (kept["runtime"]["action"], kept["changed"]) == ("keep", [])  # only --upgrade replaces the runtime
    config = world.sh("sha256sum /var/lib/edgert/config.toml")
    told = newer.edgert("bootstrap", NAME, "--engines", "null", "--set", "serving.of_tomorrow=1.0", code=4)
    assert "--upgrade" in told["error"]["message"]  # the device's runtime does not know the setting
    assert world.sh("sha256sum /var/lib/edgert/config.toml") == config
    (done,) = newer.edgert("bootstrap", NAME, "--engines", "null", "--upgrade")["devices"]
    assert (done["runtime"]["action"], done["changed"]) == ("upgrade", ["runtime"])
    assert done["runtime"]["sent_bytes"] < 2e6  # only edgert's own wheel
    assert world.in_use() == done["runtime"]["id"] != before
    assert world.sh("/opt/edgert/venv/bin/python -c 'import edgert; print(edgert.WHICH)'") == "newer"
    world.wait_until_it_serves()
    (again,) = newer.edgert("bootstrap", NAME, "--engines", "null", "--upgrade")["devices"]
    assert again["changed"] == []
    assert sorted(world.sh("ls /opt/edgert/venvs").split()) == sorted([before, done["runtime"]["id"]])
    (back,) = newer.edgert("bootstrap", NAME, "--previous-runtime")["devices"]
    assert (back["changed"], world.in_use()) == (["runtime"], before)
    world.wait_until_it_serves()


def test_a_runtime_that_fails_its_self_test_is_never_used(world: World) -> None:
    wrong = world.another(
        "wrong", "edgert/engines/null.py", "array.astype(spec.dtype) for", "array.astype(spec.dtype) + 1 for"
    )
    before = world.in_use()
    failed = wrong.edgert("bootstrap", NAME, "--engines", "null", "--upgrade", code=9)
    assert "self-test" in failed["error"]["message"]
    assert world.in_use() == before
    world.wait_until_it_serves()


def test_a_runtime_whose_daemon_does_not_start_is_rolled_back_by_the_device(world: World) -> None:
    """The self-test passes, so only the trial can find the fault."""
    broken = world.another(
        "broken", "edgert/cli/serve.py", "    from edgert.daemon", "    raise SystemExit(3)\n    from edgert.daemon"
    )
    before = world.in_use()
    failed = broken.edgert("bootstrap", NAME, "--engines", "null", "--upgrade", "--trial", f"{TRIAL_S}s", code=9)
    assert failed["error"]["code"] == "deploy.rolled_back"
    assert world.in_use() == before
    world.wait_until_it_serves()
    assert len(world.sh("ls /opt/edgert/venvs").split()) == 2  # the failed runtime is removed


def test_a_power_cut_during_a_trial_rolls_the_runtime_back(world: World) -> None:
    """The new runtime hangs, so its trial lasts until the power cut. No operator acts when the power returns."""
    hanging = world.another(
        "hanging",
        "edgert/cli/serve.py",
        "    from edgert.daemon",
        "    import time; time.sleep(9999)\n    from edgert.daemon",
    )
    before = world.in_use()
    upgrade = threading.Thread(
        target=hanging.edgert, args=("bootstrap", NAME, "--engines", "null", "--upgrade"), kwargs={"code": 9}
    )
    upgrade.start()
    home = world.container.root / "opt/edgert"
    wait_until(
        lambda: (home / "trial").exists() and os.readlink(home / "venv").rpartition("/")[2] != before,
        "it is on trial",
        COMMAND_S_MAX,
    )
    world.container.cycle()
    world.wait_until_it_serves()
    assert world.in_use() == before
    assert not (home / "trial").exists()
    upgrade.join(COMMAND_S_MAX)  # the host noticed the rollback
    assert not upgrade.is_alive()


def test_without_python_the_message_names_the_package_to_install(world: World) -> None:
    world.sh("mkdir /root/away && mv /usr/bin/python3* /root/away/")
    try:
        refused = world.host.edgert("bootstrap", NAME, code=7)
    finally:
        world.sh("mv /root/away/python3* /usr/bin/ && rmdir /root/away")
    assert "Debian GNU/Linux 12 (bookworm)) has no Python" in refused["error"]["message"]
    assert "apt-get install python3-venv" in refused["error"]["message"]


def test_uninstall_removes_the_runtime_and_keeps_models_unless_purged(world: World) -> None:
    (shown,) = world.host.edgert("uninstall", NAME, "--dry-run")["devices"]
    world.wait_until_it_serves()
    world.host.edgert("uninstall", NAME, "--yes")
    assert set(shown["removed"]) >= {"/etc/systemd/system/edgertd.service", "user and group edgert"}
    assert sorted(world.sh("ls /var/lib/edgert").split()) == ["config.toml", "keys", "models"]
    world.host.edgert("bootstrap", NAME, "--engines", "null")
    world.wait_until_it_serves()  # the next runtime finds the models that stayed


def test_a_purge_leaves_no_trace(world: World) -> None:
    note = world.container.root / "var/lib/edgert/note"
    note.write_text("not of edgert\n")
    (gone,) = world.host.edgert("uninstall", NAME, "--purge", "--yes")["devices"]
    assert any(left.startswith("/var/lib/edgert (note") for left in gone["left"])
    note.unlink()
    (rest,) = world.host.edgert("uninstall", NAME, "--purge", "--yes")["devices"]
    assert rest["removed"] == ["/var/lib/edgert"]
    after = everything(world.container.root)
    assert {
        k: (world.before.get(k), after.get(k))
        for k in world.before.keys() | after.keys()
        if world.before.get(k) != after.get(k)
    } == {}
    assert world.host.edgert("uninstall", NAME, "--purge", "--yes")["devices"] == [
        {"device": NAME, "removed": [], "left": []}
    ]
