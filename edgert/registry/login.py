"""The login at a registry: credentials in Docker's format, and answers to the registry's challenges.

On a host the file is `~/.docker/config.json`, which `docker login`, `podman login --compat-auth-file` and `skopeo login
--compat-auth-file` write. On a device, the configuration names a file of the same format:

    {"auths": {"registry.example.org": {"auth": "BASE64 OF user:password"}}}

The tokens follow https://distribution.github.io/distribution/spec/auth/token/.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from edgert.errors import ConfigInvalid, RegistryError, RegistryLoginRefused
from edgert.registry.connection import Connection, checked_location
from edgert.toml_file import refuse_pipe

FILE_BYTES_MAX = 1024**2
TOKEN_BYTES_MAX = 64 * 1024
HELPER_S_MAX = 60.0
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_HERE = ("127.0.0.1", "::1", "localhost")
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Credentials:
    """A user and the password or token at one host."""

    user: str
    secret: str

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def read_credentials(file: Path | None, host: str) -> Credentials | None:
    """Return the credentials for `host` in a file of Docker's format; None if the file has none.

    If the file names a credential helper for the host, this function runs the helper, like Docker. Raises
    ConfigInvalid.
    """
    if file is None:
        return None
    try:
        refuse_pipe(file)
        with file.open("rb") as opened:
            value = json.loads(opened.read(FILE_BYTES_MAX))
        helper = value.get("credHelpers", {}).get(host) or value.get("credsStore")
        auths = value.get("auths", {})
        entry = auths.get(host) or auths.get(f"https://{host}")
        if entry is not None and entry.get("identitytoken"):
            raise ConfigInvalid(_identity_token(f"{file}", host))
        if entry is not None and entry.get("auth"):
            user, _, secret = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
            return Credentials(user, secret)
    except OSError as error:
        raise ConfigInvalid(
            f"cannot read the login file {file}: {error.strerror}; check its path and its mode"
        ) from error
    except (ValueError, AttributeError, TypeError, RecursionError, binascii.Error) as error:
        raise ConfigInvalid(
            f'{file} is not a login file: it must read {{"auths": {{"{host}": {{"auth": "..."}}}}}}, as docker login writes it'
        ) from error
    return _ask_helper(str(helper), host, file) if helper else None


def _ask_helper(helper: str, host: str, file: Path) -> Credentials | None:
    """Run `docker-credential-HELPER get`: https://github.com/docker/docker-credential-helpers#development."""
    if not _HELPER.fullmatch(helper):
        raise ConfigInvalid(
            f"{file} names the credential helper {helper[:80]!r}, which is not a program name: correct the file"
        )
    import subprocess

    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=HELPER_S_MAX, check=False
        )
        if done.returncode:
            if b"credentials not found" in done.stdout:
                return None
            reason = done.stdout.decode(errors="replace")[:200]
            raise ConfigInvalid(f"{program} gives no login for {host}: {reason}. Log in again: docker login {host}")
        value = json.loads(done.stdout)
        if value["Username"] == "<token>":
            raise ConfigInvalid(_identity_token(program, host))
        return Credentials(str(value["Username"]), str(value["Secret"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigInvalid(f"{file} names the credential helper {program}, which cannot be run: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigInvalid(
            f"the answer of {program} for {host} cannot be read: log in again (docker login {host})"
        ) from error


def _identity_token(source: str, host: str) -> str:
    return (
        f"{source} has an identity token for {host}, as of a login by a web page, which EdgeRT cannot use: log in with a "
        f"user and a password or access token (docker login --username USER {host})"
    )


class Login:
    """Answers the challenges of one registry. Later requests send the same answer."""

    def __init__(self, connection: Connection, host: str, credentials: Credentials | None) -> None:
        self.header = ""
        self._connection = connection
        self._host = host
        self._credentials = credentials

    def answer(self, url: str, challenge: str) -> None:
        """Set `header` to the answer to a challenge of `url`. Raises RegistryLoginRefused and RegistryError."""
        self._check_tls(url, "its address has no TLS, so others could read the password: use oci://")
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self._credentials is None:
                raise RegistryLoginRefused(self._nothing())
            self.header = self._credentials.basic
        elif scheme.lower() == "bearer":
            self.header = f"Bearer {self._token(url, dict(_PARAMETER.findall(rest)))}"
        else:
            raise RegistryError(f"{self._host} requires a login of the kind {scheme[:40]!r}; known: Basic, Bearer")

    def _check_tls(self, url: str, reason: str) -> None:
        """Raise RegistryLoginRefused if the password would travel to another machine without TLS."""
        parts = urlsplit(url)
        if parts.scheme != "https" and self._credentials is not None and parts.hostname not in _HERE:
            raise RegistryLoginRefused(f"{self._host} requires a login, but {reason}")

    def refused(self) -> str:
        """Return the reason why the registry refused the request after the answer to its challenge."""
        if self._credentials is None:
            return self._nothing()
        return (
            f"{self._host} refuses user {self._credentials.user!r}: log in again (docker login {self._host}), or allow "
            "the user to do this in the repository"
        )

    def _nothing(self) -> str:
        return f"{self._host} requires a login, but there is none for it: log in with docker login {self._host}"

    def _token(self, url: str, given: dict[str, str]) -> str:
        realm = checked_location(url, given.get("realm", ""))
        self._check_tls(
            realm, f"its token service {realm[:200]} has no TLS, so others could read the password: use oci://"
        )
        query = urlencode([(key, given[key]) for key in ("service", "scope") if key in given])
        token_url = f"{realm}{'&' if urlsplit(realm).query else '?'}{query}"
        headers = {} if self._credentials is None else {"Authorization": self._credentials.basic}
        with (
            self._connection.limited(realm, self._connection.answer_s),
            self._connection.request("GET", token_url, headers) as response,
        ):
            if response.status in (401, 403):
                raise RegistryLoginRefused(self.refused())
            data = response.read(TOKEN_BYTES_MAX)
            if response.status != 200:
                raise RegistryError(f"{realm[:200]} answers {response.status} and gives no token for {self._host}")
        return _read_token(data, realm)


def _read_token(data: bytes, realm: str) -> str:
    try:
        value: Any = json.loads(data)
        token = str(value.get("token") or value["access_token"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RegistryError(
            f"the token from {realm[:200]} cannot be read: check that the registry uses this address for tokens"
        ) from error
    if not re.fullmatch(r"[!-~]{1,32768}", token):
        raise RegistryError(
            f"the token from {realm[:200]} is not 1 to 32768 printable characters: check the registry's token service"
        )
    return token
