"""Names in a registry: `oci://HOST[:PORT]/REPOSITORY`, tags and digests.

The OCI distribution specification defines the rules:
https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#pulling-manifests
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from edgert.errors import ConfigInvalid

ADDRESS_CHARS_MAX = 500
_SCHEMES = {"oci": "https", "oci+http": "http"}
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::([0-9]{1,5}))?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Repository:
    """A repository: `scheme` is https or http, `host` may have a port, `name` is the path in the registry."""

    scheme: str
    host: str
    name: str

    def __str__(self) -> str:
        shown = next(ours for ours, scheme in _SCHEMES.items() if scheme == self.scheme)
        return f"{shown}://{self.host}/{self.name}"

    @property
    def url(self) -> str:
        """The base URL for the paths of the distribution protocol, without a slash at its end."""
        return f"{self.scheme}://{self.host}/v2/{self.name}"


def parse_repository(text: str) -> Repository:
    """Return the repository of `oci://HOST[:PORT]/NAME` (`oci+http://`: no TLS). Raises ConfigInvalid."""
    scheme, separator, rest = text.partition("://")
    host, _, name = rest.partition("/")
    if len(text) > ADDRESS_CHARS_MAX or not separator or scheme not in _SCHEMES:
        raise ConfigInvalid(
            f"{text[:80]!r} is not the address of a repository: give oci://HOST/REPOSITORY, or oci+http:// without TLS"
        )
    if "@" in host:
        raise ConfigInvalid(
            f"the address of {host.rpartition('@')[2][:80]} contains a login: remove it from the address"
        )
    if not (found_host := _HOST.fullmatch(host)) or int(found_host[1] or 0) > 65535:
        raise ConfigInvalid(f"{text[:80]!r} names no host: give oci://HOST[:PORT]/REPOSITORY")
    if not _REPOSITORY.fullmatch(name):
        raise ConfigInvalid(
            f"{text[:80]!r} names no repository: give words of a-z 0-9 . _ - between slashes after the host, without "
            "a tag, such as oci://registry.example.org/plant/models"
        )
    return Repository(_SCHEMES[scheme], host, name)


def digest_of(data: bytes) -> str:
    """Return the digest that names `data` in a registry."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
