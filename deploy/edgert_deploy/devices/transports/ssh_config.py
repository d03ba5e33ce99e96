"""The user's ~/.ssh/config, and the private keys that it or the inventory names."""

from __future__ import annotations

import base64
import contextlib
import getpass
import glob
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.config import SSHConfig
from paramiko.pkey import UnknownKeyType

from edgert.durable import os_error_as
from edgert.durations import UNITS_S
from edgert.errors import ConfigInvalid

INCLUDES_MAX = 64
CONFIG_BYTES_MAX = 1024**2
KEYS_MAX = 64
_SETTING = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+)")
# The value of these settings is the rest of the line.
_COMMANDS = {"proxycommand", "localcommand", "remotecommand", "knownhostscommand"}
_COMMENT = re.compile(r"""((?:"[^"]*"|[^"])*?)\s#.*""")  # a comment at the end of a line, outside of quotes
_TIME = re.compile(r"(?:\d+[smhdw]?)+", re.I)  # a time of sshd_config(5), such as 1m30s
_UNIT_S = {**UNITS_S, "": 1, "w": 604_800}
_NEVER = "Host !*"
_UNKNOWN_CRITERIA = {"localnetwork", "tagged", "version", "sessiontype", "command"}  # paramiko takes these as true
_KEY_HEAD_BYTES = 256  # enough for "-----BEGIN OPENSSH PRIVATE KEY-----" and similar lines


class _Exec:
    """Runs the commands of `Match exec`. paramiko's own function, invoke, would read from stdin."""

    @staticmethod
    def run(command: str, **_: object) -> Any:
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return SimpleNamespace(ok=done.returncode == 0)


paramiko.config.invoke = _Exec


def read_ssh_config() -> SSHConfig:
    """Return the SSH configuration of the user and the system, with included files. Raises ConfigInvalid."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # no name, as in `docker run --user 54321`; paramiko and Fabric need a name
        os.environ["LOGNAME"] = str(os.getuid())
    config = SSHConfig()
    for path in (_path("~/.ssh/config"), Path("/etc/ssh/ssh_config")):
        try:
            config.parse(iter(_lines(path, path.parent, [INCLUDES_MAX])))
        except (paramiko.SSHException, OSError, ValueError) as error:
            raise ConfigInvalid(
                f"{path} is not a valid ssh configuration: {error}. Correct it; ssh -G HOST checks it"
            ) from error
    return config


def login_keys(settings: Any, identity: str) -> dict[str, Any]:
    """Return paramiko's options for the login. Missing key files of ~/.ssh/config are ignored."""
    own = _identity_key(_path(identity)) if identity else None
    named = [identity, *settings.get("identityfile", [])] if identity else settings.get("identityfile", [])
    files = [str(path) for path in map(_path, named) if path.is_file()]
    private = [file for file in files if not file.endswith(".pub")]
    first = _certified(private, settings.get("certificatefile", ""))
    keys: dict[str, Any] = {}
    if settings.get("identitiesonly", "no").lower() == "yes":
        # Servers refuse a login after a few wrong keys. So offer only these keys, and use the agent if it holds one of
        # them.
        first = first or _key_in_agent(agent(settings), files)
        keys = {"allow_agent": False, "look_for_keys": False}
    if first is None and own is not None:
        first, private = own, [file for file in private if file != str(_path(identity))]
    return {**keys, "key_filename": private, **({} if first is None else {"pkey": first})}


def has_locked_pem(files: list[str]) -> bool:
    """Return whether one of the files is a private key in the old PEM format with a passphrase."""
    with contextlib.suppress(OSError):  # an unreadable file is the cause of another error
        return any(b"\nProc-Type: 4,ENCRYPTED" in _head(Path(file)) for file in files)
    return False


def agent(settings: Any) -> paramiko.Agent:
    """Return the agent of the setting IdentityAgent, else the agent of $SSH_AUTH_SOCK.

    If no agent answers, return an agent without keys.
    """
    named = settings.get("identityagent", "SSH_AUTH_SOCK")
    with contextlib.suppress(paramiko.SSHException, OSError):
        return paramiko.Agent() if named == "SSH_AUTH_SOCK" else _AgentAt(named)
    return _AgentAt("none")


class _AgentAt(paramiko.Agent):  # type: ignore[misc]  # paramiko ships no types
    """The agent that listens at a path. At the path `none`, the agent holds no key. Raises OSError."""

    def __init__(self, named: str) -> None:
        AgentSSH.__init__(self)
        if named.lower() != "none":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(_path(named)))
            self._connect(connection)


def _certified(files: list[str], certificate: str) -> paramiko.PKey | None:
    """Return the key with the certificate of CertificateFile. paramiko itself reads only KEY-cert.pub."""
    if not certificate or not _path(certificate).is_file():
        return None
    for file in files:
        with contextlib.suppress(paramiko.SSHException, OSError, ValueError, TypeError):  # the key has a passphrase
            key = paramiko.PKey.from_path(file)
            key.load_certificate(str(_path(certificate)))
            return key
    return None


def _path(text: str) -> Path:
    """Return a path of the configuration, with ~ and ${VARIABLES} replaced."""
    return Path(os.path.expandvars(os.path.expanduser(text)))


def _identity_key(path: Path) -> paramiko.PKey | None:
    """Return the key in the file; None if it has a passphrase, or if its kind is unknown.

    Only the server knows whether it accepts the key. Raises ConfigInvalid.
    """
    if not path.is_file():
        raise ConfigInvalid(f"identity {path} is missing: give the private key's path")
    with os_error_as(ConfigInvalid, f"identity {path} cannot be read", "check its mode and its owner"):
        head = _head(path)
    if b"PRIVATE KEY" in head:
        files = (path, Path(f"{path}-cert.pub"))
        return _private_key(path, tuple(file.stat().st_mtime_ns for file in files if file.exists()))
    private = path.with_suffix("")
    hint = f": give {private}" if path.suffix == ".pub" and private.is_file() else ": give the private key's path"
    raise ConfigInvalid(f"identity {path} is {'a public' if path.suffix == '.pub' else 'no private'} key{hint}")


@lru_cache(maxsize=KEYS_MAX)  # to read a long RSA key takes a second, and many devices have the same identity
def _private_key(path: Path, changed_ns: tuple[int, ...]) -> paramiko.PKey | None:
    """Return the key with the certificate beside it. `changed_ns` has the times of both files."""
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, UnsupportedAlgorithm, UnknownKeyType):  # TypeError: an encrypted key. The agent may have it
        return None
    except (ValueError, OSError) as error:
        raise ConfigInvalid(f"identity {path} is damaged: copy or make the key again") from error
    # The key is valid, but paramiko cannot read the format PKCS#8. It also misreads every second ECDSA key that has no
    # comment. ssh-keygen rewrites the file in OpenSSH's format when it sets a comment.
    except paramiko.SSHException as error:
        raise ConfigInvalid(
            f"identity {path} has a format that EdgeRT cannot read; convert it: ssh-keygen -c -C edgert -f {shlex.quote(str(path))}"
        ) from error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_KEY_HEAD_BYTES)


def _key_in_agent(by: paramiko.Agent, files: list[str]) -> paramiko.PKey | None:
    """Return a key of the agent whose public half is FILE.pub of one of the files, if there is one."""
    blobs = {_public_blob(Path(f"{file.removesuffix('.pub')}.pub")) for file in files} - {b""}
    return next((key for key in by.get_keys() if key.asbytes() in blobs), None)


def _public_blob(path: Path) -> bytes:
    try:
        return base64.b64decode(path.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _lines(path: Path, folder: Path, left: list[int]) -> Iterator[str]:
    """Yield the lines of a configuration, with the lines of included files in place.

    A missing file has no lines. `left` is the number of files that may still be included.
    """
    if not path.is_file():
        return
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ConfigInvalid(f"{path} has more than {CONFIG_BYTES_MAX} bytes: shorten it")
    section = "Host *"
    for line in path.read_text(errors="replace").splitlines():  # a comment may be in another encoding
        match = _SETTING.match(line)
        if match and match[1].lower() not in _COMMANDS and (commented := _COMMENT.fullmatch(line)):
            line = commented[1]
            match = _SETTING.match(line)
        keyword, rest = (match[1].lower(), match[2]) if match else ("", "")
        if keyword == "connecttimeout":  # Fabric reads only whole seconds
            line = _connect_timeout(rest.strip())
        if keyword != "include":
            if keyword == "match" and _UNKNOWN_CRITERIA & {word.lstrip("!").lower() for word in rest.split()}:
                line = _NEVER
            section = line if keyword in ("host", "match") else section
            yield line
            continue
        for name in [name for word in shlex.split(rest) for name in _files(word, folder)]:
            left[0] -= 1
            if left[0] < 0:
                raise ConfigInvalid(
                    f"{path} includes more than {INCLUDES_MAX} files, or itself: correct its Include lines"
                )
            yield from _lines(name, folder, left)
        yield section  # the following lines belong to the section before the include


def _connect_timeout(text: str) -> str:
    """Return the setting in seconds. Without a limit (`none`), EdgeRT's own limit applies."""
    if text.lower() == "none":
        return ""
    if not _TIME.fullmatch(text):
        return f"ConnectTimeout {text}"  # `_Hop` reports it
    seconds = sum(int(count) * _UNIT_S[unit.lower()] for count, unit in re.findall(r"(\d+)([a-zA-Z]?)", text))
    return f"ConnectTimeout {seconds}"


def _files(pattern: str, folder: Path) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(str(folder / _path(pattern))))]
