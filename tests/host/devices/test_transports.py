"""Every transport keeps one contract. SSH also has pinned keys, resumed uploads and no endless wait."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from edgert.errors import DeviceError, DeviceUnreachable, EdgeRTError, HostKeyMismatch, LoginRefused, StorageFailed
from edgert_deploy.devices.inventory import Device, SshAddress
from edgert_deploy.devices.transports import TRANSPORTS, PutOptions, Transport, open_transport
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_login import LinkLimits, scan_host_key
from hil.support.keys import new_ssh_key
from hil.support.relay import Relay
from hil.support.sshd import SshDevice, running_sshd, start_sshd
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.ports import free_port

QUICK = LinkLimits(connect_s=60, keepalive_s=1, dead_after_s=60.0, attempts=3, pauses_s=(0.05,))


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest, sshd: SshDevice, tmp_path: Path) -> Iterator[Transport]:
    if request.param == "ssh":
        device = sshd.device()
    else:
        device = Device("here", request.param, str(tmp_path), "this-machine", str(tmp_path / "state"))
    opened = open_transport(device)
    yield opened
    opened.close()


# --- the contract ---------------------------------------------------------------------------


def test_run_gives_the_exit_code_and_both_streams(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "echo out; echo err >&2; exit 3"], WAIT_S_MAX)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.ok


def test_no_shell_interprets_the_words_of_a_command(transport: Transport) -> None:
    words = ["$HOME", "a b", "'", '"', ";ls", "*", "", "ä\n"]
    assert transport.run(["printf", "%s|", *words], WAIT_S_MAX).stdout == "".join(f"{word}|" for word in words)


def test_run_passes_the_input_and_returns_large_output(transport: Transport) -> None:
    data = os.urandom(300_000).hex().encode()
    assert transport.run(["cat"], WAIT_S_MAX, input=data).stdout == data.decode()


def test_a_command_without_input_reads_an_empty_input(transport: Transport) -> None:
    assert transport.run(["wc", "-c"], WAIT_S_MAX).stdout.strip() == "0"


def test_lines_on_stderr_arrive_while_the_command_runs(transport: Transport, tmp_path: Path) -> None:
    seen: list[str] = []

    def told(line: str) -> None:
        seen.append(line)
        (tmp_path / "seen").touch()

    script = 'echo one >&2; until test -e "$1"; do sleep 0.02; done; printf two >&2'
    transport.run(["sh", "-c", script, "sh", str(tmp_path / "seen")], WAIT_S_MAX, on_stderr=told)
    assert seen == ["one", "two"]


def test_a_missing_command_gives_an_exit_code(transport: Transport) -> None:
    result = transport.run(["no-such-program-7"], WAIT_S_MAX)
    assert result.exit_code == 127
    assert "not found" in result.stderr


def test_a_command_that_takes_too_long_is_given_up(transport: Transport) -> None:
    with pytest.raises(DeviceError, match="longer than"):
        transport.run(["sleep", "30"], 0.3)
    assert transport.run(["echo", "again"], WAIT_S_MAX).stdout == "again\n"


def test_a_command_that_does_not_read_its_input_is_given_up(transport: Transport) -> None:
    with pytest.raises(DeviceError, match="longer than"):
        transport.run(["sleep", "30"], 0.3, input=bytes(200_000))  # more than a pipe holds


def test_a_child_that_a_command_leaves_running_does_not_delay_the_answer(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "sleep 9999 & echo $!"], WAIT_S_MAX)
    os.kill(int(result.stdout), signal.SIGKILL)  # the child process still runs


@pytest.mark.parametrize("size", [0, 1, 200_003])
def test_put_makes_a_complete_copy(transport: Transport, tmp_path: Path, size: int) -> None:
    source, there = tmp_path / "source", tmp_path / "far" / "deep er" / "file"
    source.write_bytes(os.urandom(size))
    steps: list[tuple[int, int]] = []
    transport.put(source, str(there), PutOptions(lambda done, total: steps.append((done, total))))
    assert source.read_bytes() == there.read_bytes()
    assert steps == sorted(steps)
    assert size == 0 or steps[-1] == (size, size)
    assert [entry.name for entry in there.parent.iterdir()] == ["file"]


def test_put_sets_the_mode_and_replaces_an_existing_file(transport: Transport, tmp_path: Path) -> None:
    source, there = tmp_path / "secret", tmp_path / "far" / "secret"
    for content in ("one", "two"):
        source.write_text(content)
        transport.put(source, str(there), PutOptions(mode=0o600))
        assert there.read_text() == content
        assert there.stat().st_mode & 0o777 == 0o600


def test_put_to_a_place_that_cannot_be_written_raises_a_clear_error(transport: Transport, tmp_path: Path) -> None:
    source, blocker = tmp_path / "source", tmp_path / "blocker"
    source.write_text("x")
    blocker.write_text("a file, not a folder")
    with pytest.raises(StorageFailed):
        transport.put(source, str(blocker / "below"))


def test_a_transport_works_again_after_close(transport: Transport) -> None:
    transport.run(["true"], WAIT_S_MAX)
    transport.close()
    assert transport.run(["echo", "again"], WAIT_S_MAX).stdout == "again\n"


# --- SSH: the identity of the server -----------------------------------------------------------------------


def test_scan_returns_the_key_of_the_server(sshd: SshDevice) -> None:
    address = SshAddress.parse(sshd.address)
    assert scan_host_key(address) == sshd.host_key
    assert scan_host_key(address, sshd.fingerprint) == sshd.host_key


def test_a_server_with_one_session_at_a_time_runs_one_command_after_another(tmp_path: Path) -> None:
    """sshd refuses a session for a moment after the last session ended."""
    with (
        configured("MaxSessions 1\n", tmp_path) as server,
        contextlib.closing(SshTransport(server.device())) as transport,
    ):
        for number in range(30):
            assert transport.run(["echo", str(number)], WAIT_S_MAX).stdout == f"{number}\n"
        (tmp_path / "payload").write_text("x")
        transport.put(tmp_path / "payload", str(tmp_path / "there"))
        assert (tmp_path / "there").read_text() == "x"


def test_a_link_that_the_device_ends_is_described_in_words(tmp_path: Path) -> None:
    with (
        running_sshd(tmp_path / "sshd") as server,
        contextlib.closing(open_transport(server.device())) as transport,
        pytest.raises(DeviceUnreachable, match="the link to board was lost") as lost,
    ):
        transport.run(["sh", "-c", "kill -9 $PPID; sleep 60"], WAIT_S_MAX)  # sshd's process of this session
    assert "Error" not in lost.value.message


def test_a_server_without_sessions_is_not_taken_for_a_lost_link(tmp_path: Path) -> None:
    with configured("MaxSessions 0\n", tmp_path) as server, pytest.raises(DeviceUnreachable, match="MaxSessions"):
        SshTransport(server.device(), LinkLimits(connect_s=1)).run(["true"], WAIT_S_MAX)


@pytest.mark.parametrize("shell", ["bash", "tcsh", "fish"])
def test_every_login_shell_runs_the_words_although_it_prints_lines_first(shell: str, tmp_path: Path) -> None:
    """csh accepts no quoted line break, fish interprets quoted backslashes, and .bashrc may print lines."""
    forced = f'ForceCommand echo Welcome; exec {shell} -c "$SSH_ORIGINAL_COMMAND"\n'
    words = [
        "a b",
        "'",
        '"',
        "\\",
        "\\0041",
        "!x!!",
        "$HOME",
        "`id`",
        "\n",
        "é",
        "%b",
        "*",
        "~",
        "",
        "{a,b}",
        "#",
        "&;|<>",
    ]
    with (
        configured(forced, tmp_path) as server,
        contextlib.closing(SshTransport(server.device())) as transport,
    ):
        done = transport.run(["sh", "-c", 'printf "%s|" "$@"\numask', "sh", *words], WAIT_S_MAX)
        assert done.stdout == "".join(f"{word}|" for word in words) + "0022\n"
        assert transport.run(["cat"], WAIT_S_MAX, input=b"in").stdout == "in"
        assert transport.run(["no-such-program-7"], WAIT_S_MAX).exit_code == 127
        (tmp_path / "payload").write_bytes(data := os.urandom(100_000))
        transport.put(tmp_path / "payload", str(tmp_path / "there"))
        assert (tmp_path / "there").read_bytes() == data


def test_a_login_shell_that_hangs_is_not_taken_for_a_busy_device(tmp_path: Path) -> None:
    """For example, .bashrc starts another program."""
    with (
        configured("ForceCommand sleep 60\n", tmp_path) as server,
        contextlib.closing(SshTransport(server.device())) as transport,
        pytest.raises(DeviceError, match=r"the login shell did not run .* did not start within 1 s.*\.bashrc"),
    ):
        transport.run(["true"], 1)


def test_the_error_about_a_login_shell_that_reads_the_sent_bytes_names_its_startup_files(tmp_path: Path) -> None:
    (tmp_path / "payload").write_text("one\ntwo\n")
    with (
        configured('ForceCommand read line; eval "$SSH_ORIGINAL_COMMAND"\n', tmp_path) as server,
        contextlib.closing(SshTransport(server.device())) as transport,
        pytest.raises(StorageFailed, match=r"arrived with different bytes.*\.bashrc"),
    ):
        transport.put(tmp_path / "payload", str(tmp_path / "there"), PutOptions(resumable=True))


@pytest.mark.parametrize("become", ["", "sudo"])
def test_a_command_may_be_longer_than_the_limit_of_dropbear(tmp_path: Path, become: str) -> None:
    """dropbear closes the connection at 9000 bytes. In older versions, an uninstall failed for this reason."""
    (tmp_path / "sudo").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    limit = 'test ${#SSH_ORIGINAL_COMMAND} -lt 9000 || kill -9 $PPID; eval "$SSH_ORIGINAL_COMMAND"'
    with configured(f"ForceCommand PATH={tmp_path}:$PATH; {limit}\n", tmp_path) as server:
        transport = SshTransport(replace(server.device(), become=become), QUICK)
        for size in (1, 400, 3_000):
            done = transport.run(["sh", "-c", 'printf "%s" "$1"; wc -c', "sh", "x'\n!" * size], WAIT_S_MAX)
            assert done.stdout.replace(" ", "") == "x'\n!" * size + "0\n", done.stderr
        transport.close()


@pytest.mark.parametrize("become", ["", "sudo"])
def test_a_command_does_not_get_the_variables_that_a_login_sets_for_other_pythons(become: str, tmp_path: Path) -> None:
    """Robots have PYTHONPATH in /etc/environment, which PAM reads for the login and for sudo."""
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text('#!/bin/sh\nshift 2; PYTHONHOME=/x PYTHONPATH=/opt/ros exec "$@"\n')
    sudo.chmod(0o755)
    forced = (
        f'ForceCommand export PATH={sudo.parent}:$PATH PYTHONHOME=/x PYTHONPATH=/opt/ros; sh -c "$SSH_ORIGINAL_COMMAND"'
    )
    with (
        configured(f"{forced}\n", tmp_path) as server,
        contextlib.closing(SshTransport(replace(server.device(), become=become))) as transport,
    ):
        names = [line.partition("=")[0] for line in transport.run(["env"], WAIT_S_MAX).stdout.splitlines()]
        assert not {"PYTHONHOME", "PYTHONPATH"}.intersection(names)


@pytest.mark.parametrize(
    ("sudo", "said"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "a password is required.*NOPASSWD"),
        ("echo 'sudo: sorry, you must have a tty to run sudo' >&2; exit 1", "a tty .*!requiretty"),
        ("echo 'Sorry, user pi is not allowed to execute this' >&2; exit 1", "Sorry, user pi.*NOPASSWD"),
        ("echo 'sudo: unable to resolve host board' >&2; umask 077; shift 2; exec \"$@\"", ""),
        ("", "sudo: not found.*Install sudo"),
    ],
)
def test_messages_of_sudo_are_distinguished_from_messages_of_its_command(sudo: str, said: str, tmp_path: Path) -> None:
    """If the device's own name has no address, sudo prints a warning and continues."""
    program = tmp_path / "bin" / "sudo"
    program.parent.mkdir()
    for name in ("sh", "cat"):
        (program.parent / name).symlink_to(shutil.which(name) or "")
    if sudo:
        program.write_text(f"#!/bin/sh\n{sudo}\n")
        program.chmod(0o755)
    with running_sshd(tmp_path / "sshd", path=str(program.parent)) as server:
        device = replace(server.device(), become="sudo")
        with contextlib.closing(SshTransport(device)) as transport:
            if said:
                with pytest.raises(DeviceError, match=f"board: sudo did not run the command: .*{said}"):
                    transport.run(["cat"], WAIT_S_MAX)
                return
            assert transport.run(["cat"], WAIT_S_MAX, input=b"in").stdout == "in"
            done = transport.run(["sh", "-c", "umask; echo err >&2; exit 1"], WAIT_S_MAX)
            assert (done.exit_code, done.stdout) == (1, "0022\n")
            # sudo's secure_path, or the PATH of a user, may lack the folders of useradd.
            path = transport.run(["sh", "-c", 'echo "$PATH"'], WAIT_S_MAX).stdout.strip().split(":")
            assert {"/usr/sbin", "/sbin"} <= set(path)
            assert transport.run(["no-such-program-7"], WAIT_S_MAX).exit_code == 127


@contextlib.contextmanager
def configured(more: str, folder: Path) -> Iterator[SshDevice]:
    with running_sshd(folder / "sshd") as server:
        server.stop()
        again = start_sshd(server.folder, port=server.port, more=more)
        try:
            yield again
        finally:
            again.stop()


def test_scan_refuses_a_key_of_another_fingerprint(sshd: SshDevice) -> None:
    with pytest.raises(HostKeyMismatch, match="not SHA256:other"):
        scan_host_key(SshAddress.parse(sshd.address), "SHA256:other")


def test_a_changed_host_key_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with running_sshd(tmp_path) as server:
        device = server.device()
        server.stop()
        new_ssh_key(tmp_path / "host_key")
        (tmp_path / "log").write_text("")
        impostor = start_sshd(tmp_path, port=server.port)
        try:
            source = tmp_path / "payload"
            source.write_text("x")
            acts: list[Callable[[SshTransport], object]] = [
                lambda transport: transport.run(["true"], WAIT_S_MAX),
                lambda transport: transport.put(source, str(tmp_path / "there")),
            ]
            for act in acts:
                with pytest.raises(HostKeyMismatch, match=re.escape(impostor.fingerprint)) as caught:
                    act(SshTransport(device))
                assert caught.value.code == "device.host_key_mismatch"
            assert not (tmp_path / "there").exists()
            # sshd logs a line with the user's name as soon as it receives the name.
            assert "Accepted" not in impostor.log
            assert f"user {device.address.partition('@')[0]}" not in impostor.log
        finally:
            impostor.stop()


def test_the_file_known_hosts_does_not_change_the_pinned_key(
    sshd: SshDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    known = home / ".ssh" / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    monkeypatch.setenv("HOME", str(home))
    new_ssh_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    with pytest.raises(HostKeyMismatch):
        SshTransport(sshd.device(host_key=other)).run(["true"], WAIT_S_MAX)
    assert known.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n"


def test_the_error_of_a_refused_user_names_the_next_step(
    sshd: SshDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    new_ssh_key(tmp_path / "stranger")
    stranger = Device(**{**vars(sshd.device()), "identity": str(tmp_path / "stranger")})
    with pytest.raises(DeviceUnreachable, match=r"[^.]\. Copy your public key there \(ssh-copy-id\)"):
        SshTransport(stranger).run(["true"], WAIT_S_MAX)


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_refused_login_is_not_tried_again(
    sshd: SshDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An upload is repeated after a lost link. If a refused login were repeated, fail2ban could lock this host out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    new_ssh_key(tmp_path / "stranger", kind)
    before = sshd.log.count("Connection from")
    with pytest.raises(LoginRefused, match="Copy your public key there"):
        SshTransport(replace(sshd.device(), identity=str(tmp_path / "stranger")), QUICK).put(
            tmp_path / "stranger", str(tmp_path / "there"), PutOptions(resumable=True)
        )
    assert sshd.log.count("Connection from") == before + 1


def test_user_and_port_and_identity_come_from_the_ssh_config_of_the_user(
    sshd: SshDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    user = sshd.address.partition("@")[0]
    (tmp_path / ".ssh" / "config").write_text(
        f"Host myboard\n HostName 127.0.0.1\n Port {sshd.port}\n User {user}\n IdentityFile {sshd.client_key}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    device = Device(**{**vars(sshd.device()), "address": "myboard", "identity": ""})
    assert scan_host_key(SshAddress.parse("myboard")) == sshd.host_key
    transport = SshTransport(device)
    assert transport.run(["echo", "in"], WAIT_S_MAX).stdout == "in\n"
    transport.close()


# --- SSH: small systems ---------------------------------------------------------------------


def test_files_are_sent_without_sftp_and_need_sha256sum(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "cat", "wc", "mv", "rm", "mkdir", "chmod", "sha256sum"):
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, name
        (tools / name).symlink_to(found)
    with running_sshd(tmp_path / "sshd", path=str(tools)) as server:
        transport = SshTransport(server.device())
        source, there = tmp_path / "source", tmp_path / "far" / "a'b \\ file"
        source.write_bytes(os.urandom(300_001))
        transport.put(source, str(there), PutOptions(mode=0o600))
        assert source.read_bytes() == there.read_bytes()
        assert there.stat().st_mode & 0o777 == 0o600
        (tools / "sha256sum").unlink()
        with pytest.raises(StorageFailed, match="sha256sum is missing"):
            transport.put(source, str(there))
        transport.close()


def test_a_full_disk_is_not_taken_for_a_dead_link(tmp_path: Path) -> None:
    source, tools = tmp_path / "source", tmp_path / "tools"
    source.write_bytes(os.urandom(9_000_000))
    (tmp_path / "far").mkdir()
    tools.mkdir()
    # /dev/full fails each write like a full disk.
    (tools / "dd").write_text("#!/bin/sh\nexec /usr/bin/env -i PATH=/usr/bin:/bin dd of=/dev/full bs=32768\n")
    (tools / "dd").chmod(0o755)
    with running_sshd(tmp_path / "sshd", path=f"{tools}:/usr/bin:/bin") as server:
        transport = SshTransport(server.device(), QUICK)
        with pytest.raises(StorageFailed, match=r"^the disk of \S+ is full \(No space left on device\).*/cache may be"):
            transport.put(source, str(tmp_path / "far" / "there"))
        transport.close()
    assert list((tmp_path / "far").iterdir()) == []


# --- SSH: lost links --------------------------------------------------------------------


def test_a_port_where_nothing_listens_is_unreachable(sshd: SshDevice) -> None:
    with pytest.raises(DeviceUnreachable):
        SshTransport(sshd.device(port=free_port()), QUICK).run(["true"], WAIT_S_MAX)


def test_a_server_without_a_common_algorithm_is_reported(tmp_path: Path) -> None:
    with configured("KexAlgorithms diffie-hellman-group1-sha1\n", tmp_path) as server:
        for look in (
            lambda: SshTransport(server.device(), QUICK).run(["true"], WAIT_S_MAX),
            lambda: scan_host_key(SshAddress.parse(server.address)),
        ):
            with pytest.raises(DeviceUnreachable, match=r"no acceptable kex.*\. Its SSH server is old"):
                look()


def test_the_error_distinguishes_a_server_without_free_connections_from_a_server_that_is_off(tmp_path: Path) -> None:
    """sshd drops such connections silently, like a firewall's rule or another service."""
    with running_sshd(tmp_path) as server:
        server.stop()
        written = (server.folder / "sshd_config").read_text()
        assert "MaxStartups 100:30:200" in written
        few = written.replace("MaxStartups 100:30:200", "MaxStartups 1:100:1")
        again = start_sshd(server.folder, port=server.port, text=few)
        try:
            waits = socket.create_connection(("127.0.0.1", server.port))
            while waits.recv(4) != b"SSH-":  # sshd may still count the connection of the check that it had started
                waits.close()
                waits = socket.create_connection(("127.0.0.1", server.port))
            with waits, pytest.raises(DeviceUnreachable, match=r"does not greet as SSH does\..*MaxStartups"):
                SshTransport(again.device(), QUICK).run(["true"], WAIT_S_MAX)
        finally:
            again.stop()


@pytest.mark.parametrize("greeting_s", [0.2, WAIT_S_MAX])
def test_a_silent_server_is_unreachable_after_a_time_limit(
    sshd: SshDevice, monkeypatch: pytest.MonkeyPatch, greeting_s: float
) -> None:
    """paramiko has two time-outs, for the greeting and for the whole start. Either may come first."""
    monkeypatch.setattr(
        paramiko.Transport, "banner_timeout", property(lambda self: greeting_s, lambda self, s: None), raising=False
    )
    limits = LinkLimits(connect_s=1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DeviceUnreachable, match="no greeting in time") as caught,
    ):
        SshTransport(sshd.device(port=silent.getsockname()[1]), limits).run(["true"], WAIT_S_MAX)
    assert caught.value.code == "device.unreachable"


def test_an_upload_continues_after_the_link_was_cut(sshd: SshDevice, tmp_path: Path) -> None:
    source, there = tmp_path / "big", tmp_path / "far" / "big"
    source.write_bytes(os.urandom(12_000_000))
    with Relay(sshd.port, cut_after=[5_000_000, 5_000_000]) as relay:
        transport = SshTransport(sshd.device(port=relay.port), QUICK)
        transport.put(source, str(there))
        transport.close()
        assert relay.connections == 3
        # Without continuation, 10 MB of cut attempts and 12 MB of the last attempt would pass. Bytes that were on their
        # way at a cut are sent again: at most a channel's window of 2 MB.
        assert relay.bytes_passed < 18_000_000
    assert there.read_bytes() == source.read_bytes()
    assert [entry.name for entry in there.parent.iterdir()] == ["big"]


def test_an_upload_gives_up_after_a_bounded_number_of_attempts(sshd: SshDevice, tmp_path: Path) -> None:
    source, there = tmp_path / "big", tmp_path / "far" / "big"
    source.write_bytes(os.urandom(1_000_000))
    there.parent.mkdir()
    there.write_text("what was there")
    gave_up = pytest.raises(DeviceUnreachable, match="3 attempts failed")
    with Relay(sshd.port, cut_after=[100_000] * 20) as relay, gave_up:
        SshTransport(sshd.device(port=relay.port), QUICK).put(source, str(there))
    assert there.read_text() == "what was there"


def test_a_link_that_is_cut_during_the_login_is_not_taken_for_a_refused_login(sshd: SshDevice) -> None:
    """The command would not repeat a refused login, and would give advice about keys."""
    cuts = list(range(1000, 2000, 60))
    with Relay(sshd.port, cut_after=cuts) as relay:
        for cut in cuts:
            with contextlib.closing(SshTransport(sshd.device(port=relay.port), QUICK)) as transport:
                try:
                    transport.run(["true"], WAIT_S_MAX)
                    refused = ""
                except DeviceUnreachable as error:
                    refused = "" if error.retryable else error.message
            assert not refused, f"cut after {cut} bytes"
        assert relay.connections == len(cuts)


def test_a_link_that_freezes_during_the_login_is_not_taken_for_a_refused_login(sshd: SshDevice) -> None:
    """A device may hang for a while. The error is retryable, so the command repeats the login."""
    with Relay(sshd.port, freeze_after=1200) as relay:  # after both sides have their keys
        with pytest.raises(DeviceUnreachable, match="did not answer the login in time") as caught:
            SshTransport(sshd.device(port=relay.port), LinkLimits(connect_s=1)).run(["true"], WAIT_S_MAX)
        assert caught.value.retryable


def test_an_upload_over_a_link_that_freezes_ends_after_a_time_limit(sshd: SshDevice, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(16_000_000))
    limits = LinkLimits(connect_s=2, keepalive_s=1, dead_after_s=1.0, attempts=1, pauses_s=(0.05,))
    with Relay(sshd.port, freeze_after=400_000) as relay:
        with pytest.raises(EdgeRTError) as caught:
            SshTransport(sshd.device(port=relay.port), limits).put(source, str(tmp_path / "there"))
        assert isinstance(caught.value, DeviceUnreachable)


def test_a_command_whose_link_is_cut_is_unreachable(sshd: SshDevice) -> None:
    with Relay(sshd.port) as relay:
        transport = SshTransport(sshd.device(port=relay.port), QUICK)
        transport.run(["true"], WAIT_S_MAX)
        threading.Timer(0.5, relay.__exit__).start()
        with pytest.raises(DeviceUnreachable):
            transport.run(["sleep", "20"], WAIT_S_MAX)
