"""Settings of a ~/.ssh/config apply: agents, certificates, and criteria that paramiko does not support."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid, DeviceError, LoginRefused
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_config import read_ssh_config
from edgert_deploy.devices.transports.ssh_login import LinkLimits
from hil.support.keys import new_ssh_key
from hil.support.sshd import SshDevice, running_sshd, start_sshd
from tests.support.accounts import UID, as_nobody
from tests.support.devices import WAIT_S_MAX


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("board")) as server:
        yield server


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's configuration, which does not exist yet."""
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / ".ssh" / "config"


@contextmanager
def an_agent(key: Path, sock: Path) -> Iterator[None]:
    with subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL) as agent:
        try:
            while not sock.exists():
                assert agent.poll() is None
            subprocess.run(["ssh-add", "-q", key], check=True, env={**os.environ, "SSH_AUTH_SOCK": str(sock)})
            yield
        finally:
            agent.terminate()


def says(device: Device) -> str:
    transport = SshTransport(device, LinkLimits(connect_s=60))
    try:
        return transport.run(["sh", "-c", "echo in"], WAIT_S_MAX).stdout
    finally:
        transport.close()


def test_the_agent_that_the_configuration_names_is_used(
    board: SshDevice, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is a password manager, which also stores the public halves of its keys as files."""
    device = replace(board.device(), identity="")
    shutil.copy(f"{board.client_key}.pub", tmp_path / "board.pub")
    with an_agent(board.client_key, tmp_path / "agent"):
        with pytest.raises(LoginRefused):
            says(device)
        config.write_text("Host *\n IdentityAgent ~/agent\n")
        assert says(device) == "in\n"
        config.write_text("Host *\n IdentityAgent ${AGENT}\n IdentitiesOnly yes\n IdentityFile ${HOME}/board.pub\n")
        monkeypatch.setenv("AGENT", str(tmp_path / "agent"))
        assert says(device) == "in\n"
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        config.write_text("Host *\n IdentityAgent none\n")
        with pytest.raises(LoginRefused):
            says(device)
        config.write_text("Host *\n IdentityAgent SSH_AUTH_SOCK\n")
        assert says(device) == "in\n"


def test_an_agent_with_more_keys_than_the_server_accepts_is_reported(config: Path, tmp_path: Path) -> None:
    """The server ends the connection. In older versions, the error was `unreachable`, and an upload was repeated."""
    with running_sshd(tmp_path / "server") as server:
        server.stop()
        again = start_sshd(server.folder, port=server.port, more="MaxAuthTries 2\n")
        for name in ("one", "two", "three", "four"):
            new_ssh_key(tmp_path / name)
        try:
            with an_agent(tmp_path / "one", tmp_path / "agent"):
                environment = {**os.environ, "SSH_AUTH_SOCK": str(tmp_path / "agent")}
                for name in ("two", "three", "four"):
                    subprocess.run(["ssh-add", "-q", tmp_path / name], check=True, env=environment)
                config.write_text("Host *\n IdentityAgent ~/agent\n")
                with pytest.raises(LoginRefused, match=r"after several keys\. Offer one key: --identity"):
                    says(replace(again.device(), identity=""))
                assert says(again.device()) == "in\n"
        finally:
            again.stop()


@pytest.mark.parametrize("by", ["file", "agent"])
def test_a_user_can_log_in_with_a_certificate(config: Path, tmp_path: Path, by: str) -> None:
    """The server trusts only the authority. paramiko finds a certificate only beside its key."""
    with running_sshd(tmp_path / "server") as server:
        server.stop()
        user = server.address.partition("@")[0]
        for name in ("authority", "mine"):
            new_ssh_key(tmp_path / name)
        sign = ["ssh-keygen", "-q", "-s", f"{tmp_path}/authority", "-I", "me", "-n", user, f"{tmp_path}/mine.pub"]
        subprocess.run(sign, check=True)
        (server.folder / "authorized_keys").write_text("")
        again = start_sshd(server.folder, port=server.port, more=f"TrustedUserCAKeys {tmp_path}/authority.pub\n")
        device = replace(server.device(), identity="")
        try:
            if by == "agent":
                with an_agent(tmp_path / "mine", tmp_path / "agent"):
                    config.write_text("Host *\n IdentityAgent ~/agent\n")
                    assert says(device) == "in\n"
                return
            (tmp_path / "mine-cert.pub").rename(tmp_path / "elsewhere-cert.pub")
            config.write_text("Host *\n IdentityFile ~/mine\n")
            with pytest.raises(LoginRefused):
                says(device)
            config.write_text("Host *\n IdentityFile ~/mine\n CertificateFile ~/elsewhere-cert.pub\n")
            assert says(device) == "in\n"
        finally:
            again.stop()


def test_no_user_is_asked_for_a_second_factor(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """paramiko would print the server's question on stdout and read an answer, for all devices at the same time."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    more = "Match User *\n KbdInteractiveAuthentication yes\n PasswordAuthentication yes\n"
    with running_sshd(tmp_path / "server") as server:
        for second in ("password", "keyboard-interactive"):
            server.stop()
            server = start_sshd(
                server.folder, port=server.port, more=f"{more} AuthenticationMethods publickey,{second}\n"
            )
            with pytest.raises(LoginRefused, match=r"asks for a password or a code.*AuthenticationMethods publickey"):
                says(server.device())
        server.stop()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        ("/usr/sbin/nologin", "This account is currently not available"),
        ("internal-sftp", "This service allows sftp connections only"),
        ("echo 'Please login as the user ubuntu'; exit 142", r"Please login as the user ubuntu \(exit code 142\)"),
    ],
)
def test_the_error_names_a_login_that_runs_another_command(
    config: Path, tmp_path: Path, forced: str, said: str
) -> None:
    with running_sshd(tmp_path / "server") as server:
        server.stop()
        more = f"Subsystem sftp internal-sftp\nForceCommand {forced}\n"
        again = start_sshd(server.folder, port=server.port, more=more)
        try:
            with pytest.raises(DeviceError, match=f"did not run EdgeRT.s command: {said}.*ForceCommand") as caught:
                says(again.device())
            assert caught.value.code == "device.error"
        finally:
            again.stop()


def test_sections_with_conditions_that_cannot_be_checked_do_not_apply(config: Path) -> None:
    config.write_text(
        "Match tagged work\n User one\nMatch host board !localnetwork 10.0.0.0/8\n User two\nMatch host board\n Port 7\n"
    )
    found = read_ssh_config().lookup("board")
    assert (found.get("user"), found["port"]) == (None, "7")


def test_words_of_the_configuration_may_be_separated_by_a_tab(config: Path) -> None:
    """In older versions, such an include was ignored, and the lines after it applied to every host."""
    (config.parent / "more").write_text("Host board\n Port 7\n")
    config.write_text("Include\tmore\nHost\tother\n\tInclude = none\n\tUser\tone\nMatch\ttagged x\n Port 9\n")
    found = read_ssh_config()
    assert [(each.get("user"), each.get("port")) for each in map(found.lookup, ("board", "other"))] == [
        (None, "7"),
        ("one", None),
    ]


def test_a_line_may_end_with_a_comment(config: Path) -> None:
    """OpenSSH accepts this, except after a command."""
    config.write_text(
        'Host board # the first one\n HostName 10.0.0.7 # by DHCP\n User "a #b"\n IdentityFile ~/a#b\n'
        ' ProxyCommand ssh -W %h:%p b #1\nMatch originalhost board exec "test 1 = 1 # yes" # no\n Port 7\n'
    )
    found = read_ssh_config().lookup("board")
    assert (found["hostname"], found["port"]) == ("10.0.0.7", "7")
    assert found["identityfile"] == [f"{config.parents[1]}/a#b"]
    assert (found["user"].strip('"'), found["proxycommand"]) == ("a #b", "ssh -W 10.0.0.7:7 b #1")


@pytest.mark.parametrize(("text", "seconds"), [("7", "7"), ("1m30s", "90"), ("2M", "120"), ("none", None)])
def test_connect_timeout_may_have_a_unit(config: Path, text: str, seconds: str | None) -> None:
    config.write_text(f"Host board\n ConnectTimeout {text}\n")
    assert read_ssh_config().lookup("board").get("connecttimeout") == seconds


def test_a_command_of_the_configuration_does_not_read_stdin(config: Path) -> None:
    """In older versions, the answer to a question, or an input of `edgert infer`, lost its first byte."""
    config.write_text('Match host board exec "cat; exit 0"\n User one\nMatch host board exec "exit 3"\n Port 7\n')
    program = (
        "import sys; from edgert_deploy.devices.transports.ssh_config import read_ssh_config; "
        "found = read_ssh_config().lookup('board'); print(found['user'], found.get('port'), sys.stdin.read())"
    )
    done = subprocess.run([sys.executable, "-c", program], input="yes\n", capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("one None yes\n\n", "")


def test_configuration_files_of_fabric_are_ignored(board: SshDevice, config: Path, tmp_path: Path) -> None:
    """In older versions, Fabric's files chose the user and the port, and a broken file was a fault in edgert."""
    for text in ("user: nobody-else\nport: 9\n", "user: [\n"):
        (tmp_path / ".fabric.yml").write_text(text)
        config.write_text(f"Host board\n HostName 127.0.0.1\n Port {board.port}\n")
        assert says(replace(board.device(), address="board")) == "in\n"


def test_lines_that_paramiko_reads_in_another_way_are_ignored_or_refused(board: SshDevice, config: Path) -> None:
    config.write_text("Host *\n ForwardAgent /run/agent.sock\n")
    assert says(board.device()) == "in\n"
    config.write_text("Host *\n CanonicalizeHostname yes\n")
    with pytest.raises(ConfigInvalid, match=r"~/\.ssh/config cannot be applied to board: .*ssh -G board"):
        says(replace(board.device(), address="board"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_an_account_gets_a_configuration_with_the_numeric_user_id() -> None:
    imported = "from edgert_deploy.devices.transports.ssh_login import Jump, SshAddress, _Hop"
    assert as_nobody(imported, "(lambda: _Hop(Jump(SshAddress('board')), 'board', 'board').connection.user)") == str(
        UID
    )
