"""paramiko's errors during a login, as reasons for a message. No other file knows paramiko's texts.

paramiko has few error classes, so this module recognizes an error by its text. The texts below belong to the versions
that `pyproject.toml` allows.
"""

from __future__ import annotations

from typing import NamedTuple

import paramiko
from paramiko.ssh_exception import IncompatiblePeer, NoValidConnectionsError

_NO_GREETING = "Error reading SSH protocol banner"
_REFUSED = "Authentication failed."
_LOCKED = "Private key file is encrypted"
_NO_KEY = "No authentication methods available"
_LINK_LOST = "transport shut down or saw EOF"  # the connection ended in the middle of the login
_LATE_ANSWER = "Authentication timeout"  # the device hangs, or the link is dead
_NO_SESSION = "No existing session"  # the server is silent, or it closed the connection during the login


class SecondFactorNeeded(paramiko.AuthenticationException):  # type: ignore[misc]  # paramiko ships no types
    """The server accepts a key and requires a second factor."""


class Refusal(NamedTuple):
    """The reason why a server refuses a login, and the user's next step.

    `needs_key` tells whether this step is to copy a key to the server.
    """

    reason: str
    next_step: str
    needs_key: bool = False


def refusal(error: BaseException, *, encrypted: bool, connected: bool = False, locked: bool = False) -> Refusal | None:
    """Return the refusal; None if the server does not refuse the login.

    Args:
        encrypted: Whether the key exchange was complete when the error came.
        connected: Whether the connection is still up.
        locked: Whether a named key in the old PEM format has a passphrase.
    """
    if encrypted and connected and type(error) is paramiko.SSHException and _NO_KEY not in str(error):
        # If the server refuses an RSA or ECDSA key, or if such a key in PEM format has a passphrase, paramiko reads the
        # key again as a key of another kind. Then paramiko reports only the error of this second reading.
        error = paramiko.PasswordRequiredException(_LOCKED) if locked else paramiko.AuthenticationException(_REFUSED)
    text = str(error)
    if encrypted and _NO_SESSION in text:
        return Refusal(
            "it ended the connection after several keys",
            "Offer one key: --identity FILE, or IdentityFile with IdentitiesOnly yes in ~/.ssh/config",
        )
    is_refused = isinstance(error, paramiko.AuthenticationException) or _NO_KEY in text
    if not is_refused or _LINK_LOST in text or _LATE_ANSWER in text:
        return None
    text = "this host offers no SSH key" if _NO_KEY in text else text.rstrip(".")
    if isinstance(error, SecondFactorNeeded):
        return Refusal(
            text, "Let this user log in by a key alone: AuthenticationMethods publickey in sshd_config there"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return Refusal(text, "Give the key's passphrase to an agent (ssh-add)")
    if isinstance(error, paramiko.BadAuthenticationType) and "publickey" not in error.allowed_types:
        return Refusal(
            f"it accepts no keys, only: {', '.join(error.allowed_types)}",
            "EdgeRT logs in with keys only: set PubkeyAuthentication yes in sshd_config there. For a jump host, you can instead "
            "name it in ~/.ssh/config, and log in to it there first (docs/devices.md)",
        )
    advice = "Copy your public key there (ssh-copy-id), or give the private key with --identity"
    return Refusal(text, advice, needs_key=True)


def reason(error: BaseException, *, proxied: bool = False) -> str:
    """Return the reason why a machine cannot be reached, and the next step.

    `proxied` tells whether a command of ~/.ssh/config connects to the machine. Such a command prints its own messages.
    """
    if isinstance(error, NoValidConnectionsError):  # it holds one error for each address of the host
        error = next(iter(error.errors.values()))
    text = str(error)
    if isinstance(error, IncompatiblePeer):
        return (
            f"{text}. Its SSH server is old, or allows few algorithms: update it, or allow more in sshd_config, such as the "
            "cipher aes256-ctr (TinySSH has no AES cipher: install OpenSSH or dropbear)"
        )
    if isinstance(error, EOFError) or _LINK_LOST in text:
        return (
            "the connection ended during the login. Check the network and try again. If this repeats, the device may be "
            "booting, or this user's account may have expired: the log of its SSH server gives the reason"
        )
    if _LATE_ANSWER in text:
        return "it did not answer the login in time. It may be busy, or the network is down: try again"
    # paramiko has two equal time limits: for the greeting, and for the whole start of a session. If the second limit is
    # exceeded, paramiko reports _NO_SESSION.
    if _NO_SESSION in text or (_NO_GREETING in text and isinstance(error.__context__, TimeoutError)):
        return (
            "it accepts the connection, but sent no greeting in time. It or this host may be very busy: try again. "
            "Another service may have this port"
        )
    if _NO_GREETING in text and proxied:
        return "its proxy ended the connection"
    if _NO_GREETING in text:
        return (
            "it accepts the connection, but does not greet as SSH does. Another service may have this port, or the server "
            "refuses new connections for now (MaxStartups, PerSourcePenalties, fail2ban): look at its log, or wait a minute"
        )
    cause = (error.strerror if isinstance(error, OSError) else "") or text or type(error).__name__
    if isinstance(error, ConnectionRefusedError):
        return f"{cause}. It is on, but nothing listens there: check that sshd runs, and that the port is right"
    return f"{cause}. Check that it is on and that the address is right"
