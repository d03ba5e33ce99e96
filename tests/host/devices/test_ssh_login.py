"""Logins with pinned keys, on real OpenSSH servers: jump hosts, ProxyCommand, agents, ~/.ssh/config."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid, DeviceUnreachable, HostKeyMismatch, LoginRefused
from edgert_deploy.devices.inventory import Device, SshAddress, fingerprint
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_config import login_keys, read_ssh_config
from edgert_deploy.devices.transports.ssh_login import Jump, LinkLimits, scan_host_key
from hil.support.keys import new_ssh_key
from hil.support.sshd import SshDevice, running_sshd, start_sshd
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.ports import free_port


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("board")) as server:
        yield server


@pytest.fixture(scope="module")
def bastion(tmp_path_factory: pytest.TempPathFactory, board: SshDevice) -> Iterator[SshDevice]:
    """A second server. It accepts the same keys as the board, and forwards only to the board."""
    folder = tmp_path_factory.mktemp("bastion")
    with running_sshd(folder) as server:
        server.stop()
        shutil.copy(board.folder / "client_key.pub", folder / "authorized_keys")
        again = start_sshd(folder, port=server.port, more=f"PermitOpen 127.0.0.1:{board.port}\n")
        yield again
        again.stop()


@dataclass
class Home:
    """A ~/.ssh for the test."""

    ssh: Path

    def write(self, config: str, known_hosts: str = "") -> None:
        (self.ssh / "config").write_text(f"{config}Host *\n UserKnownHostsFile {self.ssh}/known_hosts\n")
        (self.ssh / "known_hosts").write_text(known_hosts)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "$HOME/.ssh/config" "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)  # OpenSSH itself ignores HOME
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return Home(tmp_path / ".ssh")


def through(board: SshDevice, bastion: SshDevice) -> Device:
    return replace(board.device(), jump=bastion.address, jump_host_key=bastion.host_key)


def known(server: SshDevice) -> str:
    return f"[127.0.0.1]:{server.port} {server.host_key}\n"


def says(device: Device) -> str:
    transport = SshTransport(device, LinkLimits(connect_s=60))
    try:
        return transport.run(["sh", "-c", "echo in"], WAIT_S_MAX).stdout
    finally:
        transport.close()


def settings(name: str, server: SshDevice, *more: str) -> str:
    user = server.address.partition("@")[0]
    lines = (f"HostName 127.0.0.1\n Port {server.port}\n User {user}", *more)
    return f"Host {name}\n " + "\n ".join(lines) + "\n"


def test_a_device_is_reached_through_its_jump_host(board: SshDevice, bastion: SshDevice, home: Home) -> None:
    before = bastion.log.count("Accepted publickey")
    assert says(through(board, bastion)) == "in\n"
    assert bastion.log.count("Accepted publickey") == before + 1
    jump = Jump(SshAddress.parse(bastion.address), bastion.host_key, str(board.client_key))
    assert scan_host_key(SshAddress.parse(board.address), board.fingerprint, jump=jump) == board.host_key


def test_a_file_is_sent_through_the_jump_host(board: SshDevice, bastion: SshDevice, home: Home, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(3_000_001))
    transport = SshTransport(through(board, bastion))
    transport.put(source, str(tmp_path / "there"))
    transport.close()
    assert (tmp_path / "there").read_bytes() == source.read_bytes()


def test_a_changed_key_of_the_jump_host_ends_the_connection_before_a_byte_is_sent(
    board: SshDevice, home: Home, tmp_path: Path
) -> None:
    with running_sshd(tmp_path / "bastion") as bastion:
        device = through(board, bastion)
        bastion.stop()
        new_ssh_key(bastion.folder / "host_key")
        shutil.copy(board.folder / "client_key.pub", bastion.folder / "authorized_keys")
        (bastion.folder / "log").write_text("")
        impostor = start_sshd(bastion.folder, port=bastion.port)
        reached = board.log
        try:
            with pytest.raises(HostKeyMismatch, match=re.escape(impostor.fingerprint)) as caught:
                says(device)
            assert "the jump host" in caught.value.message
            assert "edgert device set board --jump" in caught.value.message
            user = board.address.partition("@")[0]
            assert "Accepted" not in impostor.log
            assert f"user {user}" not in impostor.log
            assert board.log == reached
        finally:
            impostor.stop()


def test_a_changed_key_of_the_device_behind_the_jump_host_is_noticed(
    board: SshDevice, bastion: SshDevice, home: Home, tmp_path: Path
) -> None:
    new_ssh_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    accepted = board.log.count("Accepted publickey")
    with pytest.raises(HostKeyMismatch, match="edgert device set board --repin"):
        says(replace(through(board, bastion), host_key=other))
    assert board.log.count("Accepted publickey") == accepted


def test_a_device_that_the_jump_host_cannot_reach_is_reported(board: SshDevice, bastion: SshDevice, home: Home) -> None:
    elsewhere = replace(through(board, bastion), address=board.address.replace(str(board.port), str(free_port())))
    with pytest.raises(DeviceUnreachable, match=r"the jump host .* cannot connect to 127.0.0.1"):
        says(elsewhere)


def test_jump_hosts_of_the_ssh_config_are_used_in_their_order(
    board: SshDevice, bastion: SshDevice, home: Home, tmp_path: Path
) -> None:
    """The first jump host forwards only to the bastion, and the bastion only to the board."""
    with running_sshd(tmp_path / "outer") as server:
        server.stop()
        shutil.copy(board.folder / "client_key.pub", server.folder / "authorized_keys")
        outer = start_sshd(server.folder, port=server.port, more=f"PermitOpen 127.0.0.1:{bastion.port}\n")
        identity = f"IdentityFile {board.client_key}"
        hosts = settings("outer", outer, identity) + settings("inner", bastion, identity)
        device = replace(board.device(), address="board", identity="")
        try:
            home.write(
                hosts + settings("board", board, identity, "ProxyJump outer,inner"), known(outer) + known(bastion)
            )
            assert says(device) == "in\n"
            # The same path, if each host names the host before it, and if the inventory's jump host comes first.
            chained = settings("outer", outer, identity) + settings("inner", bastion, identity, "ProxyJump outer")
            home.write(chained + settings("board", board, identity, "ProxyJump inner"), known(outer) + known(bastion))
            assert says(device) == "in\n"
            home.write(chained + settings("board", board, identity), known(outer))
            assert says(replace(device, jump="inner", jump_host_key=bastion.host_key)) == "in\n"
        finally:
            outer.stop()


def test_a_jump_host_of_the_ssh_config_must_be_known(
    board: SshDevice, bastion: SshDevice, home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    identity = f"IdentityFile {board.client_key}"
    config = settings("bastion", bastion, identity) + settings("board", board, identity, "ProxyJump bastion")
    device = replace(board.device(), address="board", identity="")
    seen = bastion.log.count("user ")
    other, revoked = f"[127.0.0.1]:{bastion.port} {board.host_key}\n", f"@revoked * {bastion.host_key}\n"
    for hosts in ("", other, known(bastion) + revoked):
        home.write(config, hosts)
        with pytest.raises(DeviceUnreachable, match="ended with exit code 255, and its messages"):
            says(device)
        with pytest.raises(DeviceUnreachable, match="ended with exit code 255, and its messages"):
            scan_host_key(SshAddress.parse("board"))
        assert capfd.readouterr().err.count("Host key verification failed") == 2
    assert bastion.log.count("user ") == seen
    home.write(config, f"@cert-authority *.example {board.host_key}\n{known(bastion)}")
    assert says(device)


@pytest.mark.parametrize("key", ["ssh-dss AAAA", "ssh-ed25519 AAAA"])
def test_an_invalid_pinned_key_is_reported(board: SshDevice, home: Home, key: str) -> None:
    with pytest.raises(ConfigInvalid, match="--repin"):
        SshTransport(board.device(host_key=key)).run(["true"], 20)


def test_a_pattern_that_also_gives_the_jump_host_to_itself_does_not_cause_a_loop(
    board: SshDevice, bastion: SshDevice, home: Home
) -> None:
    identity = f"IdentityFile {board.client_key}"
    hosts = settings("bastion", bastion, identity) + settings("board", board, identity)
    home.write(f"{hosts}Host *\n ProxyJump bastion\n", known(bastion))
    assert says(replace(board.device(), address="board", identity="")) == "in\n"
    home.write(hosts + "Host *\n ProxyJump none\n ProxyCommand none\n")
    assert says(replace(board.device(), address="board", identity="")) == "in\n"


def test_a_proxy_command_is_used_and_its_end_is_noticed(
    board: SshDevice, bastion: SshDevice, home: Home, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "for_the_command"
    (tmp_path / "known").write_text(known(bastion))
    config.write_text(
        settings("bastion", bastion, f"IdentityFile {board.client_key}", f"UserKnownHostsFile {tmp_path}/known")
    )
    device = replace(board.device(), address="board")
    home.write(settings("board", board, f"ProxyCommand ssh -F {config} -W %h:%p bastion"))
    assert says(device) == "in\n"
    lost = "; (the connection ended during|its proxy ended the connection)"  # the end of file, or a reset
    for end, code, advice in (("exit 3", 3, r"\. Try it by hand: sh -c"), ("exit 0", 0, lost)):
        home.write(settings("board", board, f"ProxyCommand sh -c 'echo no way >&2; {end}'"))
        fact = f"the proxy command of ~/.ssh/config ended with exit code {code}, and its messages are above"
        with pytest.raises(DeviceUnreachable, match=f"cannot be reached: {fact}{advice}"):
            says(device)
        assert capfd.readouterr().err == "no way\n"


def test_keys_of_an_agent_are_used(
    board: SshDevice, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may have a key whose file has a passphrase, even if the user's configuration allows no other key."""
    locked = tmp_path / "locked"
    shutil.copy(board.client_key, locked)
    shutil.copy(f"{board.client_key}.pub", f"{locked}.pub")
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True, stdout=subprocess.DEVNULL)
    device = replace(board.device(), identity="")
    with pytest.raises(LoginRefused, match="ssh-add"):
        says(replace(device, identity=str(locked)))
    old = tmp_path / "old"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-m", "PEM", "-N", "secret", "-f", old], check=True)
    with pytest.raises(LoginRefused, match="ssh-add"):
        says(replace(device, identity=str(old)))
    with subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL) as agent:
        try:
            monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
            while not (tmp_path / "agent").exists():
                assert agent.poll() is None
            subprocess.run(["ssh-add", "-q", board.client_key], check=True)
            assert says(device) == "in\n"
            assert says(replace(device, identity=str(locked))) == "in\n"
            home.write(f"Host *\n IdentitiesOnly yes\n IdentityFile {locked}\n")
            assert says(device) == "in\n"
            home.write("Host *\n IdentitiesOnly yes\n IdentityFile ~/.ssh/none\n")
            with pytest.raises(LoginRefused):
                says(device)
        finally:
            agent.terminate()


def test_the_ssh_config_may_include_other_files_and_name_missing_files(board: SshDevice, home: Home) -> None:
    (home.ssh / "conf.d").mkdir()
    (home.ssh / "conf.d" / "board.conf").write_text(settings("board", board, f"IdentityFile {board.client_key}"))
    home.write("IdentityFile ~/.ssh/id_missing\nInclude conf.d/*.conf\nUser nobody-else\n")
    assert says(replace(board.device(), address="board", identity="")) == "in\n"
    assert read_ssh_config().lookup("other")["user"] == "nobody-else"
    (home.ssh / "conf.d" / "board.conf").write_bytes("# Küche\nHost other\n  User the-cook\n".encode("latin-1"))
    assert read_ssh_config().lookup("other")["user"] == "the-cook"
    home.write("Include config\n")
    with pytest.raises(ConfigInvalid, match="includes more than"):
        read_ssh_config()


def test_an_identity_that_is_not_a_private_key_is_refused_with_the_next_step(
    board: SshDevice, home: Home, tmp_path: Path
) -> None:
    with pytest.raises(ConfigInvalid, match=rf"is a public key: give {board.client_key}$"):
        says(replace(board.device(), identity=f"{board.client_key}.pub"))
    (tmp_path / "notes").write_text("ssh-ed25519 AAAA")
    with pytest.raises(ConfigInvalid, match="notes is no private key"):
        says(replace(board.device(), identity=str(tmp_path / "notes")))
    (tmp_path / "half").write_text(board.client_key.read_text()[:200])
    with pytest.raises(ConfigInvalid, match="half is damaged"):
        says(replace(board.device(), identity=str(tmp_path / "half")))
    new_ssh_key(tmp_path / "pkcs8", "rsa")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "", "-m", "PKCS8", "-f", tmp_path / "pkcs8"], check=True)
    with pytest.raises(ConfigInvalid, match=rf"convert it: ssh-keygen -c -C edgert -f {tmp_path}/pkcs8$"):
        says(replace(board.device(), identity=str(tmp_path / "pkcs8")))


def test_an_identity_is_read_only_once_for_all_devices(tmp_path: Path) -> None:
    new_ssh_key(tmp_path / "key")
    first, again = (login_keys({}, str(tmp_path / "key")) for _ in range(2))
    assert first["pkey"] is again["pkey"]
    assert first["key_filename"] == [], "paramiko would read the file again"


def test_the_command_of_the_message_makes_an_ecdsa_key_without_a_comment_readable(tmp_path: Path) -> None:
    """paramiko misreads every second ECDSA key without a comment: if the key needs no padding, it gets no bytes."""
    path = tmp_path / "bare"
    message = ""
    for _ in range(64):
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-C", "", "-f", path], check=True)
        try:
            login_keys({}, str(path))
        except ConfigInvalid as error:
            message = str(error)
            break
    command = message.partition("convert it: ")[2]
    subprocess.run(command.split(), check=True, capture_output=True)
    assert "pkey" in login_keys({}, str(path))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_the_fingerprint_may_belong_to_any_key_of_the_server(home: Home, tmp_path: Path, kind: str) -> None:
    """The server prefers its Ed25519 key. The login requests the pinned key."""
    with running_sshd(tmp_path / "server") as server:
        server.stop()
        new_ssh_key(server.folder / kind, kind)
        again = start_sshd(server.folder, port=server.port, more=f"HostKey {server.folder}/{kind}\n")
        try:
            line = " ".join((server.folder / f"{kind}.pub").read_text().split()[:2])
            address = SshAddress.parse(server.address)
            assert scan_host_key(address, fingerprint(line)) == line
            assert scan_host_key(address) == server.host_key
            assert says(server.device(host_key=line)) == "in\n"
            with pytest.raises(HostKeyMismatch) as caught:
                scan_host_key(address, "SHA256:abc")
            assert (fingerprint(line) in caught.value.message, server.fingerprint in caught.value.message) == (
                True,
                True,
            )
        finally:
            again.stop()


def test_a_wrong_fingerprint_gives_one_error_without_a_traceback(board: SshDevice) -> None:
    """The test needs a separate process, because pytest would receive paramiko's log."""
    script = (
        "from edgert_deploy.devices.inventory import SshAddress\n"
        "from edgert_deploy.devices.transports.ssh_login import scan_host_key\n"
        "from edgert.errors import HostKeyMismatch\n"
        f"try: scan_host_key(SshAddress.parse({board.address!r}), 'SHA256:abc')\n"
        "except HostKeyMismatch as error: print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (board.fingerprint in done.stdout, done.stderr) == (True, "")
    nobody = SshAddress("127.0.0.1", port=free_port())
    with pytest.raises(
        DeviceUnreachable, match=rf"127\.0\.0\.1:{nobody.port} cannot be reached over SSH: Connection refused\."
    ):
        scan_host_key(nobody)
