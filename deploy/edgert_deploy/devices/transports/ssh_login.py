"""The SSH login: jump hosts, host keys and authentication, until commands can be sent.

The only accepted host key of a device is its key in the inventory. The keys are compared at the end of the key
exchange, before a user name, a login or any payload is sent. The same applies to a jump host of the inventory. If a
jump host is only in ~/.ssh/config, the system's ssh connects to it, and must know its key. (By default, Fabric accepts
any key.)

These lines of ~/.ssh/config apply: Host, Match (by all, host, originalhost, user, localuser, exec, canonical and
final), Include, HostName, User, Port, IdentityFile, IdentitiesOnly, IdentityAgent, CertificateFile, ProxyJump,
ProxyCommand, ConnectTimeout. The login also tries the keys of an agent and the user's default keys.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import fabric
import paramiko
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import IncompatiblePeer

from edgert.backoff import doubling
from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid, DeviceUnreachable, HostKeyMismatch
from edgert.printable import endpoint
from edgert_deploy.devices.inventory import Device, SshAddress, fingerprint
from edgert_deploy.devices.transports import JumpKeyMismatch, SshLoginRefused
from edgert_deploy.devices.transports.ssh_config import agent, has_locked_pem, login_keys, read_ssh_config
from edgert_deploy.devices.transports.ssh_errors import SecondFactorNeeded, reason, refusal

# paramiko also logs the errors that it raises. Without a handler, Python would print each error with its traceback.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# OpenSSH's server refuses some connections beyond 10 that are not logged in yet (MaxStartups).
JUMP_LOGINS_AT_ONCE_MAX = 8
_JUMP_LOGINS = threading.BoundedSemaphore(JUMP_LOGINS_AT_ONCE_MAX)
_PROXY_END_S_MAX = 5.0
_PROXY_CODE_S_MAX = 1.0  # the wait for the exit code of a proxy command that closed the connection
_RSA = ("rsa-sha2-512", "rsa-sha2-256")  # the signatures of keys that are called ssh-rsa
PAUSES_S = doubling(1.0, 30.0)  # the pauses between attempts


@dataclass(frozen=True)
class LinkLimits:
    """Time limits of a link, and the number of attempts."""

    connect_s: int = 10
    # A login may wait two minutes for the device's systemd-logind. Keepalives notice a dead link long before.
    session_s: int = 150
    keepalive_s: int = 5
    dead_after_s: float = 20.0
    attempts: int = 4
    pauses_s: tuple[float, ...] = PAUSES_S


@dataclass(frozen=True)
class Jump:
    """A jump host or the device itself. `host_key` is "" in a scan, which does not know the host key yet."""

    address: SshAddress
    host_key: str = ""
    identity: str = ""

    @classmethod
    def of(cls, device: Device) -> Jump | None:
        """Return the jump host of the inventory, with the device's identity; None if there is none."""
        return cls(SshAddress.parse(device.jump), device.jump_host_key, device.identity) if device.jump else None


def log_in(device: Device, limits: LinkLimits, stack: ExitStack) -> fabric.Connection:
    """Open a connection, check the pinned host key, and log in.

    `stack` closes this connection and the connections to jump hosts. Raises DeviceUnreachable, LoginRefused,
    HostKeyMismatch (for the device or a jump host) and ConfigInvalid.
    """
    label = device.name if device.name == device.address else f"{device.name} ({device.address})"
    target = _Hop(Jump(SshAddress.parse(device.address), device.host_key, device.identity), label, device.name)
    _socket_to(target, Jump.of(device), limits, stack)
    with _JUMP_LOGINS if target.proxy_command() else contextlib.nullcontext():
        _open(target, limits)
    return target.connection


def scan_host_key(address: SshAddress, wanted: str | None = None, jump: Jump | None = None) -> str:
    """Return the host key of `address` as an OpenSSH public key line.

    The function closes the connection after the key exchange.

    The result is the key with the fingerprint `wanted` (SHA256:...), or the key that the server prefers if `wanted` is
    None. Raises DeviceUnreachable, and HostKeyMismatch if the server has no key with that fingerprint.
    """
    shown: list[str] = []
    while (key := _shown_key(address, jump, [line.split()[0] for line in shown])) is not None:
        if wanted in (None, fingerprint(key)):
            return key
        shown.append(key)
    keys = ", ".join(f"{fingerprint(line)} ({line.split()[0]})" for line in shown)
    raise HostKeyMismatch(
        f"{address.host} shows {keys}, not {wanted}: another machine answers, or the fingerprint belongs to another key. "
        "Read it on the device's own console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    )


def _shown_key(address: SshAddress, jump: Jump | None, excluded_kinds: list[str]) -> str | None:
    """Return the server's preferred key among the kinds that are not excluded; None if it has none."""
    limits = LinkLimits()
    target = _Hop(Jump(address), address.host, address.host)
    with ExitStack() as stack:
        _socket_to(target, jump, limits, stack)
        target.connection.client.set_missing_host_key_policy(_CaptureHostKey())
        target.connection.connect_kwargs["disabled_algorithms"] = {
            "keys": [*excluded_kinds, *(_RSA if "ssh-rsa" in excluded_kinds else ())]
        }
        try:
            _connect(target.connection, limits)
            raise AssertionError("a connection without a pinned key was opened")
        except _HostKeyCaptured as seen:
            return f"{seen.key.get_name()} {seen.key.get_base64()}"
        except (OSError, EOFError, paramiko.SSHException) as error:
            if excluded_kinds and isinstance(error, IncompatiblePeer):
                return None
            at = endpoint(address.host, address.port) if address.port else address.host
            raise DeviceUnreachable(f"{at} cannot be reached over SSH: {target.unreachable(error)}") from error


class _HostKeyCaptured(Exception):  # not an error: it carries the host key out of paramiko
    def __init__(self, key: paramiko.PKey) -> None:
        self.key = key


class _CaptureHostKey(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko ships no types
    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        raise _HostKeyCaptured(key)


class _KeyOnlyTransport(paramiko.Transport):  # type: ignore[misc]  # paramiko ships no types
    """A transport without prompts: paramiko would read a second factor from stdin, and print on stdout."""

    def auth_interactive_dumb(self, *_: object) -> list[str]:
        raise SecondFactorNeeded("the key is accepted, but the server asks for a password or a code as well")


class _Hop:
    """A machine on the path to the device: a jump host, or the device itself. `_open` connects to it.

    `label` is its name in messages. If `is_jump`, it is a jump host of `device`.
    """

    def __init__(self, jump: Jump, label: str, device: str, *, is_jump: bool = False) -> None:
        self.address, self.alias, self.host_key = jump.address, jump.address.host, jump.host_key
        self.label, self.device, self.is_jump = label, device, is_jump
        self.config = read_ssh_config()
        self.proxy: subprocess.Popen[bytes] | None = None  # runs the proxy command
        try:
            self.connection = fabric.Connection(
                jump.address.host,
                user=jump.address.user,
                port=jump.address.port,
                gateway=False,
                forward_agent=False,  # no command of EdgeRT logs in from the device to another machine
                config=fabric.Config(lazy=True, ssh_config=self.config),  # ignore the configuration files of Fabric
            )
        except (paramiko.SSHException, KeyError, ValueError) as error:  # as for CanonicalizeHostname without domains
            raise ConfigInvalid(
                f"~/.ssh/config cannot be applied to {jump.address.host}: {type(error).__name__} {error}. See its "
                f"settings for this host: ssh -G {jump.address.host}"
            ) from error
        self.settings = self.connection.ssh_config
        keys = login_keys(self.settings, jump.identity)
        self.connection.connect_kwargs = {**keys, "transport_factory": _KeyOnlyTransport}
        if "identityagent" in self.settings:
            self.connection.client._agent = agent(self.settings)
        self.connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())

    def unreachable(self, error: BaseException) -> str:
        """Return why this machine cannot be reached, and the next step."""
        if self.proxy is None:
            return reason(error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.proxy.wait(_PROXY_CODE_S_MAX)
        code = self.proxy.returncode
        state = "still runs" if code is None else f"ended with exit code {code}"
        known = f"the proxy command of ~/.ssh/config {state}, and its messages are above"
        # A proxy also ends with 0 if the machine closed the connection.
        return f"{known}. Try it by hand: {self.proxy_command()}" if code else f"{known}; {reason(error, proxied=True)}"

    def proxy_command(self) -> str | None:
        """Return the proxy command that ~/.ssh/config gives for this machine; None if ssh connects directly.

        As in ssh, a ProxyJump becomes a command of the system's ssh.
        """
        jumps, command = self.settings.get("proxyjump", "none"), self.settings.get("proxycommand")
        if jumps.lower() == "none":
            return None if command is None else str(command)
        words = [word.strip().removeprefix("ssh://").rstrip("/") for word in jumps.split(",")]
        hosts = [SshAddress.parse(word).host for word in words]
        # A pattern such as `Host *` may name a jump host, but the connection to that host itself needs no jump.
        if self.alias in hosts:
            return None
        *before, last = words
        loops = self.config.lookup(hosts[-1]).get("proxyjump") == jumps
        chain = ["-J", ",".join(before)] if before else ["-o", "ProxyJump=none"] if loops else []
        target = f"[{self.connection.host}]:{self.connection.port}"
        return shlex.join(["ssh", "-o", "BatchMode=yes", *chain, "-W", target, f"ssh://{last}"])


def _socket_to(target: _Hop, jump: Jump | None, limits: LinkLimits, stack: ExitStack) -> None:
    """Open all connections on the path to `target`. Then give `target` the socket for its own connection."""
    first = target
    if jump is not None:
        where = f"{jump.address.user + '@' if jump.address.user else ''}{jump.address.host}"
        first = _Hop(jump, f"the jump host {where} of {target.device}", target.device, is_jump=True)
    if (command := first.proxy_command()) is not None:
        first.connection.connect_kwargs["sock"] = stack.enter_context(_proxy(command, first))
    if first is not target:
        with _JUMP_LOGINS:
            _open(first, limits)
        stack.callback(first.connection.client.close)
        target.connection.connect_kwargs["sock"] = _forwarded(first, target, limits)
    stack.callback(target.connection.client.close)


def _open(hop: _Hop, limits: LinkLimits) -> None:
    """Connect, compare the host key, log in. Raises the errors of `log_in`."""
    name = hop.connection.host if hop.connection.port == 22 else f"[{hop.connection.host}]:{hop.connection.port}"
    kind, blob = hop.host_key.split()[:2]
    try:
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(blob))
    except (UnknownKeyType, paramiko.SSHException, ValueError) as error:
        raise ConfigInvalid(
            f"the pinned host key of {hop.label} is invalid ({hop.host_key[:40]}...). Pin it again: "
            f"edgert device set {hop.device} {_pin_option(hop)}"
        ) from error
    hop.connection.client.get_host_keys().add(name, kind, key)
    with _translated(hop):
        _connect(hop.connection, limits)
    transport = hop.connection.transport
    transport.set_keepalive(limits.keepalive_s)
    if isinstance(transport.sock, socket.socket) and transport.sock.family != socket.AF_UNIX:
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.dead_after_s * 1000))


def _connect(connection: fabric.Connection, limits: LinkLimits) -> None:
    timeouts: dict[str, float] = dict.fromkeys(("banner_timeout", "auth_timeout"), limits.connect_s)
    timeouts["channel_timeout"] = limits.session_s
    connection.connect_kwargs = {**timeouts, **connection.connect_kwargs}
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
        raise (JumpKeyMismatch if hop.is_jump else HostKeyMismatch)(
            f"{hop.label} shows host key {fingerprint(shown)}; pinned is {fingerprint(hop.host_key)}. Nothing was sent. If its system is "
            f"new, compare the fingerprint on its own console, then pin it: edgert device set {hop.device} {_pin_option(hop)}"
        ) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        transport = hop.connection.client.get_transport()
        encrypted = transport is not None and transport.initial_kex_done
        connected = encrypted and transport.is_active()
        locked = connected and has_locked_pem(hop.connection.connect_kwargs["key_filename"])
        refused = refusal(error, encrypted=encrypted, connected=connected, locked=locked)
        if refused is not None:
            user = hop.connection.user
            raise SshLoginRefused(
                f"{hop.label} refuses the login of {user}: {refused.reason}",
                refused.next_step,
                hop.address if refused.needs_key else None,
            ) from error
        raise DeviceUnreachable(f"{hop.label} cannot be reached: {hop.unreachable(error)}") from error


def _pin_option(hop: _Hop) -> str:
    """Return the option of `edgert device set` that pins the machine's key again."""
    return f"--jump {hop.connection.host}" if hop.is_jump else "--repin"


def _forwarded(hop: _Hop, following: _Hop, limits: LinkLimits) -> Any:
    """Return a channel through `hop` to the next machine."""
    host, port = following.connection.host, following.connection.port
    try:
        return hop.connection.transport.open_channel("direct-tcpip", (host, port), ("", 0), timeout=limits.connect_s)
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise DeviceUnreachable(
            f"{following.label} cannot be reached: {hop.label} cannot connect to {endpoint(host, port)}: {reason(error)}"
        ) from error


@contextmanager
def _proxy(command: str, hop: _Hop) -> Iterator[socket.socket]:
    """Run a ProxyCommand on one end of a socket pair; yield the other end.

    paramiko's own class is not used here, because it continues to read after the command has ended.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # As in ssh, the command replaces the shell.
            words = ["/bin/sh", "-c", f"exec {command}"]
            with os_error_as(DeviceUnreachable, f"{hop.label}: ProxyCommand `{command}` fails"):
                process = hop.proxy = subprocess.Popen(words, stdin=theirs.fileno(), stdout=theirs.fileno())
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
