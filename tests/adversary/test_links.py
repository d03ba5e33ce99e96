"""The daemon's user creates links in the state folder. Root deploys, and never writes through a link."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import StorageFailed
from edgert_deploy.bootstrap.runtime import script_text
from edgert_deploy.devices.device_files import DeviceFile, config_text, holds, put
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import PutOptions, Transport, in_folder, open_transport
from hil.support.sshd import running_sshd
from tests.support.devices import WAIT_S_MAX

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the attack is on root")

RACE_S = 2.0
NOBODY = pwd.getpwnam("nobody")
SECRET = "only root changes this\n"

_BECOME = "import os, sys; os.setgroups([]); os.setgid({gid}); os.setuid({uid}); print('ready', flush=True)\n"
# Swaps the folder argv[1] and a link to argv[2] as fast as possible. The host may create the folder at the same time.
_SWAP_FOLDER = """
import time
folder, victim = sys.argv[1:]
while True:
    try:
        os.rename(folder, folder + ".kept"); os.symlink(victim, folder); os.unlink(folder); os.rename(folder + ".kept", folder)
    except OSError:
        try: os.unlink(folder)
        except OSError: os.rename(folder, f"{folder}.{time.monotonic_ns()}")
        if os.path.exists(folder + ".kept"): os.rename(folder + ".kept", folder)
        else: os.mkdir(folder)
"""
# Puts a link to argv[2] in place of each partial file in the folder argv[1] as fast as possible.
_SWAP_PARTIALS = """
folder, victim = sys.argv[1:]
while True:
    for name in os.listdir(folder):
        if name.endswith(".part"):
            try:
                os.unlink(os.path.join(folder, name)); os.symlink(victim, os.path.join(folder, name))
            except OSError: pass
"""


@dataclass
class Attacked:
    """A device that root deploys to. The user `nobody` owns the state folder, and root owns `victim`."""

    device: Device
    transport: Transport
    victim: Path

    @property
    def state(self) -> Path:
        return Path(self.device.state)

    @property
    def secret(self) -> Path:
        return self.victim / "secret"

    def unharmed(self) -> bool:
        mode = self.secret.stat().st_mode & 0o777
        left = [path.name for path in self.victim.iterdir()]
        return (self.secret.read_text(), mode, self.secret.owner(), left) == (SECRET, 0o600, "root", ["secret"])

    @contextmanager
    def attacked_by(self, program: str, *words: Path) -> Iterator[None]:
        """Run a Python program as the owner of the state folder during the block."""
        become = _BECOME.format(uid=NOBODY.pw_uid, gid=NOBODY.pw_gid)
        argv = [sys.executable, "-I", "-c", become + program, *map(os.fspath, words)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as attacker:
            try:
                assert attacker.stdout is not None
                assert attacker.stdout.readline() == b"ready\n"
                yield
                assert attacker.poll() is None, "the attacker gave up"
            finally:
                attacker.kill()


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    with tempfile.TemporaryDirectory() as folder, running_sshd(Path(folder) / "sshd") as sshd:
        Path(folder).chmod(0o755)
        victim = Path(folder) / "victim"
        victim.mkdir()
        (victim / "secret").write_text(SECRET)
        (victim / "secret").chmod(0o600)
        for path in (sshd.state, sshd.state / "incoming"):
            path.mkdir()
            os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
        (sshd.state / "keys").mkdir()
        transport = open_transport(sshd.device())
        yield Attacked(sshd.device(), transport, victim)
        transport.close()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "one.edgert"
    path.write_bytes(os.urandom(100_000))
    return path


def test_a_link_under_the_name_of_a_resumed_upload_is_not_followed(attacked: Attacked, bundle: Path) -> None:
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()[:32]
    there = attacked.state / "incoming" / bundle.name
    os.symlink(attacked.secret, there.with_name(f".{there.name}.{digest}.part"))
    with contextlib.suppress(StorageFailed):
        attacked.transport.put(bundle, str(there), PutOptions(resumable=True))
    assert attacked.unharmed()


def test_a_link_in_place_of_the_folder_is_refused(attacked: Attacked, bundle: Path) -> None:
    (attacked.state / "incoming").rmdir()
    os.symlink(attacked.victim, attacked.state / "incoming")
    with pytest.raises(StorageFailed, match="incoming is a link"):
        attacked.transport.put(bundle, f"{attacked.state}/incoming/secret", PutOptions(resumable=True))
    assert attacked.unharmed()


@pytest.mark.parametrize("target", ["victim", "victim/secret"])
def test_a_link_in_place_of_the_configuration_is_replaced_by_a_file(attacked: Attacked, target: str) -> None:
    config = attacked.state / "config.toml"
    os.symlink(attacked.victim.parent / target, config)
    put(attacked.transport, attacked.device, DeviceFile(str(config), b'device = "d"\n', "configuration"))
    assert attacked.unharmed()
    assert (config.is_symlink(), config.read_bytes(), config.owner()) == (False, b'device = "d"\n', "root")


def test_a_link_in_place_of_the_keys_is_refused(attacked: Attacked) -> None:
    (attacked.state / "keys").rmdir()
    os.symlink(attacked.victim, attacked.state / "keys")
    for name in ("keys/secret", "config.toml"):
        with pytest.raises(StorageFailed, match="keys is a link"):
            put(attacked.transport, attacked.device, DeviceFile(f"{attacked.state}/{name}", b"x", "key"))
    assert attacked.unharmed()


def test_the_removal_of_a_key_removes_no_file_behind_a_link(attacked: Attacked) -> None:
    key = new_key().public
    (attacked.state / "config.toml").write_text('device = "d"\nprofile = "p"\n')
    words = [
        sys.executable,
        "-m",
        "edgert.cli",
        "--state",
        attacked.device.state,
        "keys",
        "remove",
        key.key_id,
        "--force",
    ]
    keys, there = attacked.state / "keys", attacked.state / "keys" / "one.pem"
    there.write_bytes(key.pem())
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, there.exists()) == (0, False), done.stderr
    keys.rmdir()
    keys.symlink_to(attacked.victim)
    for owner in (0, NOBODY.pw_uid):  # root keeps its rights if it read the owner before the link existed
        os.chown(keys, owner, owner, follow_symlinks=False)
        (attacked.victim / "one.pem").write_bytes(key.pem())
        assert subprocess.run(words, capture_output=True, timeout=60).returncode != 0
        (attacked.victim / "one.pem").unlink()
    assert attacked.unharmed()


def test_a_transferred_file_belongs_to_the_owner_of_the_folder(attacked: Attacked, bundle: Path) -> None:
    there = attacked.state / "incoming" / "deeper" / bundle.name
    attacked.transport.put(bundle, str(there), PutOptions(resumable=True))
    assert there.read_bytes() == bundle.read_bytes()
    assert (there.owner(), there.parent.owner()) == ("nobody", "nobody")


def test_the_transport_of_a_local_device_follows_no_link(attacked: Attacked, bundle: Path) -> None:
    here = Device("here", "local", attacked.device.state, "this-machine", attacked.device.state)
    transport, incoming = open_transport(here), attacked.state / "incoming"
    transport.put(bundle, f"{incoming}/deeper/one")
    there = incoming / "deeper" / "one"
    assert (there.read_bytes(), there.owner(), there.parent.owner()) == (bundle.read_bytes(), "nobody", "nobody")
    for program, words in ((_SWAP_PARTIALS, (incoming, attacked.secret)), (_SWAP_FOLDER, (incoming, attacked.victim))):
        with attacked.attacked_by(program, *words):
            _again_and_again(lambda: transport.put(bundle, f"{incoming}/one"))
    assert attacked.unharmed()


def test_a_file_that_a_link_leads_root_to_does_not_reach_the_daemons_user(attacked: Attacked) -> None:
    """If root copied its own file as the configuration, the daemon's user could read the copy."""
    config = attacked.state / "config.toml"
    attacked.victim.chmod(0o755)
    os.symlink(attacked.secret, config)
    with pytest.raises(StorageFailed, match="cannot be read"):
        config_text(attacked.device.state, attacked.transport)
    assert not holds(attacked.transport, DeviceFile(str(config), SECRET.encode(), "configuration"))
    config.unlink()
    assert config_text(attacked.device.state, attacked.transport) == ""
    os.mkfifo(config)
    assert not holds(attacked.transport, DeviceFile(str(config), b"", "configuration"))


def test_root_ends_no_process_of_another_user(attacked: Attacked) -> None:
    """The daemon's user writes the id of such a process into the pid file."""
    home = Path(attacked.device.home)
    home.mkdir(parents=True)
    (home / "runtime.sh").write_bytes(script_text())
    stop = ["sh", str(home / "runtime.sh"), "stop", attacked.device.state]
    with subprocess.Popen([sys.executable, "-c", "input()", "edgert"], stdin=subprocess.PIPE) as process:
        pid_file = attacked.state / "edgertd.pid"
        pid_file.write_text(str(process.pid))
        subprocess.run(stop, timeout=60)
        pid_file.unlink()
        os.symlink("/dev/zero", pid_file)
        subprocess.run(stop, timeout=60)
        assert process.poll() is None
        process.kill()


def test_a_folder_that_everybody_can_change_is_refused(attacked: Attacked, bundle: Path) -> None:
    attacked.victim.chmod(0o777)
    with pytest.raises(StorageFailed, match="chmod go-w"):
        attacked.transport.put(bundle, f"{attacked.victim}/one")
    assert attacked.unharmed()


def test_a_device_without_setpriv_uses_its_python(attacked: Attacked) -> None:
    tools = attacked.victim.parent / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "id", "awk"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    # Use the system's Python: another user may not be able to read a Python below root's home.
    (tools / "python3").symlink_to("/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable)
    words = in_folder(f"{attacked.state}/incoming", ["id", "-un"])
    done = subprocess.run(words, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert (done.stdout, done.stderr) == ("nobody\n", "")
    (tools / "python3").unlink()
    done = subprocess.run(words, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert done.returncode != 0
    assert "install util-linux" in done.stderr


def test_a_folder_that_is_swapped_for_a_link_during_an_upload_leads_nowhere(attacked: Attacked, bundle: Path) -> None:
    incoming = attacked.state / "incoming"
    with attacked.attacked_by(_SWAP_FOLDER, incoming, attacked.victim):
        _again_and_again(lambda: attacked.transport.put(bundle, f"{incoming}/one", PutOptions(resumable=True)))
    assert attacked.unharmed()


def test_a_partial_file_that_is_swapped_for_a_link_during_an_upload_leads_nowhere(
    attacked: Attacked, bundle: Path
) -> None:
    incoming = attacked.state / "incoming"
    with attacked.attacked_by(_SWAP_PARTIALS, incoming, attacked.secret):
        _again_and_again(lambda: attacked.transport.put(bundle, f"{incoming}/one", PutOptions(resumable=True)))
    assert attacked.unharmed()


def test_a_configuration_that_is_swapped_for_a_link_while_root_writes_it_leads_nowhere(attacked: Attacked) -> None:
    config = DeviceFile(f"{attacked.state}/config.toml", b'device = "d"\n', "configuration")
    with attacked.attacked_by(_SWAP_PARTIALS, attacked.state, attacked.secret):
        _again_and_again(lambda: put(attacked.transport, attacked.device, config))
    assert attacked.unharmed()
    assert Path(config.path).read_bytes() == config.data


def _again_and_again(work: Callable[[], None]) -> None:
    until = time.monotonic() + RACE_S
    while time.monotonic() < until:
        with contextlib.suppress(StorageFailed):
            work()
