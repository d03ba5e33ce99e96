"""The SSH login: jump hosts, host keys and authentication, up to the moment when commands can be sent.

The only accepted host key of a device is the one in the inventory. It is compared at the end of the key exchange, before
a user name, a login or any payload is sent. The same holds for a jump host of the inventory; a jump host that only
~/.ssh/config names must be in known_hosts. (Fabric's own default accepts any key.)

These lines of ~/.ssh/config apply: Host, Match, Include, HostName, User, Port, IdentityFile, IdentitiesOnly, ProxyJump,
ProxyCommand, ConnectTimeout, UserKnownHostsFile. Keys may also come from an agent or be the user's default keys.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import NoValidConnectionsError

from edgert.errors import ConfigInvalid, DeviceUnreachable, HostKeyMismatch, LoginRefused
from edgert_deploy.devices.inventory import Device, SshAddress, fingerprint
from edgert_deploy.devices.transports.ssh_config import login_keys, read_ssh_config

# paramiko raises its errors and also logs them; without a handler Python would print each one with its traceback.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

HOPS_MAX = 8
# OpenSSH's server refuses some connections beyond 10 that are not logged in yet (MaxStartups).
JUMP_LOGINS_AT_ONCE_MAX = 8
_JUMP_LOGINS = threading.BoundedSemaphore(JUMP_LOGINS_AT_ONCE_MAX)
_PROXY_END_S_MAX = 5.0
NO_KEY = "No authentication methods available"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@dataclass(frozen=True)
class LinkLimits:
    """Time limits of a link, and how often it is tried again."""

    connect_s: int = 10
    # A login may wait two minutes for the device's systemd-logind. Keepalives notice a dead link long before.
    session_s: int = 150
    keepalive_s: int = 5
    dead_after_s: float = 20.0
    attempts: int = 4
    pause_s: float = 1.0


@dataclass(frozen=True)
class Jump:
    """A machine between this host and a device. With the host key "", known_hosts decides."""

    address: SshAddress
    host_key: str = ""
    identity: str = ""

    @classmethod
    def of(cls, device: Device) -> Jump | None:
        """Return the jump host of the inventory, with the device's identity; None if there is none."""
        return cls(SshAddress.parse(device.jump), device.jump_host_key, device.identity) if device.jump else None


def log_in(device: Device, limits: LinkLimits, stack: ExitStack) -> fabric.Connection:
    """Open a connection, check the pinned host key, and log in.

    `stack` closes it, and those to jump hosts below it. Raises DeviceUnreachable, LoginRefused, HostKeyMismatch (also
    for a jump host), ConfigInvalid.
    """
    called = f"{device.name} ({device.address})"
    target = _Hop(Jump(SshAddress.parse(device.address), device.host_key, device.identity), called, device.name)
    _way(target, Jump.of(device), limits, stack)
    _open(target, limits)
    return target.connection


def scan_host_key(address: SshAddress, wanted: str | None = None, jump: Jump | None = None) -> str:
    """Return the host key that `address` shows as an OpenSSH public key line, after the key exchange alone.

    Raises DeviceUnreachable, and HostKeyMismatch if the key has another fingerprint than `wanted` (SHA256:...).
    """
    limits = LinkLimits()
    target = _Hop(Jump(address), address.host, address.host)
    with ExitStack() as stack:
        _way(target, jump, limits, stack)
        target.connection.client.set_missing_host_key_policy(_OnlyLook())
        try:
            _connect(target.connection, limits)
            raise AssertionError("a connection without a pinned key was opened")
        except _Seen as seen:
            kind, key = seen.key.get_name(), f"{seen.key.get_name()} {seen.key.get_base64()}"
        except (OSError, EOFError, paramiko.SSHException) as error:
            at = f"{address.host}:{address.port}" if address.port else address.host
            raise DeviceUnreachable(f"{at} cannot be reached over SSH: {_reason(error)}") from error
    if wanted not in (None, fingerprint(key)):
        raise HostKeyMismatch(
            f"{address.host} shows {fingerprint(key)} ({kind}), not {wanted}: another machine answers, or the fingerprint "
            "belongs to another key. Read it on the device's own console: "
            "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
        )
    return key


class _Seen(Exception):  # carries the host key out of paramiko; no error
    def __init__(self, key: paramiko.PKey) -> None:
        self.key = key


class _OnlyLook(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko ships no types
    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        raise _Seen(key)


class _Hop:
    """A machine on the way; the device is the last. Its connection is made here and opened later."""

    def __init__(self, jump: Jump, called: str, device: str) -> None:
        self.host_key, self.called, self.device = jump.host_key, called, device
        config = read_ssh_config()
        self.connection = fabric.Connection(
            jump.address.host,
            user=jump.address.user,
            port=jump.address.port,
            gateway=False,
            config=fabric.Config(ssh_config=config),
        )
        self.settings = self.connection.ssh_config
        self.connection.connect_kwargs = login_keys(self.settings, jump.identity)
        self.connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())

    @property
    def end(self) -> tuple[str, str, int]:
        return self.connection.user, self.connection.host, self.connection.port

    def proxy_jumps(self) -> list[SshAddress]:
        """Return the jump hosts of ~/.ssh/config, in the order of connection."""
        said = self.settings.get("proxyjump", "none")
        words = [] if said.lower() == "none" else said.split(",")
        return [SshAddress.parse(word.strip().removeprefix("ssh://").rstrip("/")) for word in words]

    def proxy_command(self) -> str | None:
        """Return the ProxyCommand with %h, %p and %r expanded; None if there is a ProxyJump instead."""
        return None if self.proxy_jumps() else self.settings.get("proxycommand")


def _way(target: _Hop, jump: Jump | None, limits: LinkLimits, stack: ExitStack) -> None:
    """Open all connections before `target`, and give it the socket to connect over."""
    before = _hops_before(target, jump)
    first = before[0] if before else target
    if (command := first.proxy_command()) is not None:
        first.connection.connect_kwargs["sock"] = stack.enter_context(_proxy(command, first.called))
    for hop, following in pairwise([*before, target]):
        with _JUMP_LOGINS:
            _open(hop, limits)
        stack.callback(hop.connection.client.close)
        following.connection.connect_kwargs["sock"] = _forwarded(hop, following, limits)
    stack.callback(target.connection.client.close)


def _hops_before(target: _Hop, jump: Jump | None) -> list[_Hop]:
    """Return the jump hosts in the order of connection. The first may have its own in ~/.ssh/config."""

    def hop(jump: Jump) -> _Hop:
        where = f"{jump.address.user + '@' if jump.address.user else ''}{jump.address.host}"
        return _Hop(jump, f"the jump host {where} of {target.device}", target.device)

    found = [hop(jump)] if jump is not None else [hop(Jump(address)) for address in target.proxy_jumps()]
    while found and (more := [hop(Jump(address)) for address in found[0].proxy_jumps()]):
        # A pattern such as `Host *` may name a jump host; the connection to that host itself goes without it.
        if {each.end for each in more} & {each.end for each in (*found, target)}:
            break
        found = [*more, *found]
        if len(found) > HOPS_MAX:
            raise ConfigInvalid(f"{target.called} is behind more than {HOPS_MAX} jump hosts in ~/.ssh/config")
    if jump is None and any(each.end == target.end for each in found):
        return []
    return found


def _open(hop: _Hop, limits: LinkLimits) -> None:
    """Connect, compare the host key, log in. Raises as `log_in`."""
    client = hop.connection.client
    name = hop.connection.host if hop.connection.port == 22 else f"[{hop.connection.host}]:{hop.connection.port}"
    if hop.host_key:
        kind, blob = hop.host_key.split()[:2]
        try:
            key = paramiko.PKey.from_type_string(kind, base64.b64decode(blob))
        except (UnknownKeyType, paramiko.SSHException, ValueError) as error:
            raise ConfigInvalid(
                f"the pinned host key of {hop.called} is invalid ({hop.host_key[:40]}...). Pin it again: "
                f"edgert device set {hop.device} {_again(hop)}"
            ) from error
        client.get_host_keys().add(name, kind, key)
    else:
        files = hop.settings.get("userknownhostsfile", "~/.ssh/known_hosts").split()
        revoked: set[str] = set()
        for path in (Path(file).expanduser() for file in (*files, _SYSTEM_KNOWN_HOSTS)):
            if path.is_file():
                revoked |= _load_known_hosts(client, path)
        known = client.get_host_keys().lookup(name)
        if known is not None and any(key.get_base64() in revoked for key in known.values()):
            raise HostKeyMismatch(f"known_hosts marks the key of {hop.called} as @revoked. Nothing was sent")
        if known is None:
            raise DeviceUnreachable(
                f"{hop.called} is in no known_hosts. Log in there once with ssh, or pin its key: "
                f"edgert device set {hop.device} --jump {hop.connection.host}"
            )
    with _translated(hop):
        _connect(hop.connection, limits)
    transport = hop.connection.transport
    transport.set_keepalive(limits.keepalive_s)
    if isinstance(transport.sock, socket.socket) and transport.sock.family != socket.AF_UNIX:
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.dead_after_s * 1000))


def _load_known_hosts(client: paramiko.SSHClient, path: Path) -> set[str]:
    """Load a known_hosts file, and return the keys that lines with @revoked name, for any host.

    paramiko knows neither @revoked nor @cert-authority, and stops at an invalid line: that raises ConfigInvalid.
    """
    try:
        lines = path.read_text().splitlines()
        with tempfile.NamedTemporaryFile("w", prefix="edgert-known-") as plain:
            plain.write("\n".join("" if line.lstrip().startswith("@") else line for line in lines))
            plain.flush()
            client.get_host_keys().load(plain.name)
        marked = [line.split() for line in lines if line.lstrip().startswith("@revoked")]
        return {words[3] for words in marked if len(words) > 3}
    except (OSError, UnicodeDecodeError, InvalidHostKey, paramiko.SSHException) as error:
        line = f"{error.line[:60]!r}: " if isinstance(error, InvalidHostKey) else ""
        raise ConfigInvalid(f"{path} cannot be read ({line}{error.args[-1]}): repair that line or remove it") from error


def _connect(connection: fabric.Connection, limits: LinkLimits) -> None:
    patience: dict[str, float] = dict.fromkeys(("banner_timeout", "auth_timeout"), limits.connect_s)
    patience["channel_timeout"] = limits.session_s
    connection.connect_kwargs = {**patience, **connection.connect_kwargs}
    if "connecttimeout" not in connection.ssh_config:
        connection.connect_timeout = limits.connect_s
    connection.open()


@contextmanager
def _translated(hop: _Hop) -> Iterator[None]:
    """Translate the errors of paramiko and the socket."""
    try:
        yield
    except paramiko.BadHostKeyException as error:
        shown = f"{error.key.get_name()} {error.key.get_base64()}"
        raise HostKeyMismatch(
            f"{hop.called} shows host key {fingerprint(shown)}; pinned is {_pinned(hop)}. Nothing was sent. If its system is "
            f"new, compare the fingerprint on its own console, then pin it: edgert device set {hop.device} {_again(hop)}"
        ) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        # paramiko has no error class for a user without any key.
        if isinstance(error, paramiko.AuthenticationException) or NO_KEY in str(error):
            raise LoginRefused(
                f"{hop.called} refuses the login of {hop.connection.user}: {str(error).rstrip('.')}. {_key_advice(error)}"
            ) from error
        raise DeviceUnreachable(f"{hop.called} cannot be reached: {_reason(error)}") from error


def _again(hop: _Hop) -> str:
    """Return the option that pins its key again."""
    return f"--jump {hop.connection.host}" if hop.called.startswith("the jump host") else "--repin"


def _key_advice(error: BaseException) -> str:
    if isinstance(error, paramiko.PasswordRequiredException):
        return "Give the key's passphrase to an agent (ssh-add)"
    return "Copy your public key there (ssh-copy-id), or give the private key with --identity"


def _pinned(hop: _Hop) -> str:
    return fingerprint(hop.host_key) if hop.host_key else "another one in known_hosts"


def _forwarded(hop: _Hop, following: _Hop, limits: LinkLimits) -> Any:
    """Return a channel through `hop` to the next machine."""
    _, host, port = following.end
    try:
        return hop.connection.transport.open_channel("direct-tcpip", (host, port), ("", 0), timeout=limits.connect_s)
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise DeviceUnreachable(
            f"{following.called} cannot be reached: {hop.called} cannot connect to {host}:{port}: {_reason(error)}"
        ) from error


@contextmanager
def _proxy(command: str, called: str) -> Iterator[socket.socket]:
    """Run a ProxyCommand on one end of a socket pair, and yield the other end.

    paramiko's own class never stops reading after the command's end.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            try:
                # As in ssh, the command replaces the shell.
                words = ["/bin/sh", "-c", f"exec {command}"]
                process = subprocess.Popen(words, stdin=theirs.fileno(), stdout=theirs.fileno())
            except OSError as error:
                raise DeviceUnreachable(
                    f"{called}: ProxyCommand `{command}` cannot be run: {error.strerror}"
                ) from error
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            process.terminate()
            try:
                process.wait(_PROXY_END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _reason(error: BaseException) -> str:
    if isinstance(error, NoValidConnectionsError):  # it has one error for each address of the host
        error = next(iter(error.errors.values()))
    said = error.strerror if isinstance(error, OSError) else ""
    text = said or str(error) or type(error).__name__
    return f"{text}. Check that it is on and that the address is right"
