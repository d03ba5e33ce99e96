"""Real OCI registries for tests: Debian's docker-registry on a free loopback port, in its own folder.

with RegistryServer.in_folder(tmp_path) as server: ...                 # without TLS, for everybody
secured = RegistryServer.in_folder(tmp_path, secured=True)             # TLS, a user and a password
with Mirror(folder, secured) as mirror: ...                            # nginx in front of it
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import bcrypt

from edgert.registry.address import Repository, parse_repository
from edgert.registry.client import Registry
from edgert.registry.login import read_credentials
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.paths import ROOT
from tests.support.servers.brokers import write_authority_and_server
from tests.support.servers.ports import free_port

EXAMPLES = ROOT / "examples" / "registry"
CONFIGURATION, MIRROR = EXAMPLES / "registry.yml", EXAMPLES / "nginx.conf"
USER = "publisher"
PASSWORD = "right horse"


def program(name: str) -> str:
    """Return the path of docker-registry, skopeo or nginx; fail the test if it is missing."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    assert path, f"{name} is not installed, and these tests use a real one: make servers"
    return path


@dataclass
class RegistryServer:
    """A docker-registry, stopped and started again on one port; containers reach it at `host`."""

    folder: Path
    secured: bool = False
    host: str = "localhost"
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def in_folder(cls, folder: Path, *, secured: bool = False, host: str = "localhost") -> RegistryServer:
        """Write keys, users and a login file; `start` or a `with` statement runs it."""
        folder.mkdir(parents=True, exist_ok=True)
        server = cls(folder, secured, host)
        write_authority_and_server(folder)
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
        (folder / "users").write_text(f"{USER}:{hashed}\n")
        server.write_login(PASSWORD)
        return server

    def write_login(self, password: str) -> None:
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        self.login_file.write_text(json.dumps({"auths": {f"localhost:{self.port}": {"auth": auth}}}))

    @property
    def login_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def repository(self) -> Repository:
        return parse_repository(self.address)

    @property
    def address(self) -> str:
        return f"{'oci' if self.secured else 'oci+http'}://{self.host}:{self.port}/plant/models"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def requests(self) -> list[str]:
        """Return the lines of the registry's access log."""
        return [line for line in (self.folder / "log").read_text().splitlines() if '"GET ' in line or '"HEAD ' in line]

    def registry(self) -> Registry:
        """Return a client with the login."""
        if not self.secured:
            return Registry(self.repository)
        return Registry(self.repository, read_credentials(self.login_file, self.repository.host), self.ca)

    def start(self) -> None:
        tls = {
            "REGISTRY_HTTP_TLS_CERTIFICATE": f"{self.folder}/server.pem",
            "REGISTRY_HTTP_TLS_KEY": f"{self.folder}/server.key",
            "REGISTRY_AUTH_HTPASSWD_PATH": f"{self.folder}/users",
        }
        # Without TLS and users, the configuration's own tables have to go.
        configuration = self.folder / "registry.yml"
        text = CONFIGURATION.read_text()
        configuration.write_text(text if self.secured else text.partition("  tls:")[0])
        environment = {
            **os.environ,
            "REGISTRY_HTTP_ADDR": f"{self.host}:{self.port}",
            "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": f"{self.folder}/data",
            **(tls if self.secured else {}),
        }
        with open(self.folder / "log", "ab") as log:
            words = [program("docker-registry"), "serve", str(configuration)]
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        what = f"docker-registry listens on {self.port}; see {self.folder}/log"
        wait_until(lambda: answers(self._process, self.port, self.folder / "log", self.host), what)

    def stop(self) -> None:
        """Stop the registry by its pid if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_S_MAX)
            self._process = None

    def __enter__(self) -> RegistryServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass
class Mirror:
    """nginx as in examples/registry, before a secured server, whose authority signed its certificate."""

    folder: Path
    server: RegistryServer
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.server.address.replace(str(self.server.port), str(self.port))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def registry(self) -> Registry:
        """Return a client without a login. The mirror logs in to the server."""
        return Registry(parse_repository(self.address), None, self.server.ca)

    def __enter__(self) -> Mirror:
        self.folder.mkdir(parents=True, exist_ok=True)
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (self.server.folder / "login.conf").write_text(f'proxy_set_header Authorization "Basic {auth}";\n')
        text = self._text()
        paths = " ".join(
            f"{kind}_temp_path {self.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root; " if os.geteuid() == 0 else ""
        main = f"{user}daemon off; worker_processes 1; pid {self.folder}/pid; error_log {self.folder}/log;"
        configuration = self.folder / "nginx.conf"
        configuration.write_text(f"{main}\nevents {{}}\nhttp {{ access_log off; {paths}\n{text}\n}}\n")
        words = [program("nginx"), "-p", str(self.folder), "-e", f"{self.folder}/log", "-c", str(configuration)]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        wait_until(lambda: answers(self._process, self.port, self.folder / "log"), f"nginx listens on {self.port}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_S_MAX)

    def _text(self) -> str:
        text = MIRROR.read_text()
        for theirs, ours in (
            ("/etc/nginx/edgert", str(self.server.folder)),
            ("/var/cache/nginx/edgert", f"{self.folder}/cache"),
            ("listen 443", f"listen 127.0.0.1:{self.port}"),
            ("registry.internal:5000", f"localhost:{self.server.port}"),
            ("registry.internal", "localhost"),
        ):
            assert theirs in text
            text = text.replace(theirs, ours)
        return text


class Proxy(Mirror):
    """nginx before a server without TLS, with nginx's own limits."""

    def registry(self) -> Registry:
        return Registry(parse_repository(self.address))

    def _text(self) -> str:
        there = f"proxy_pass http://localhost:{self.server.port}; proxy_set_header Host $http_host;"
        return f"server {{ listen 127.0.0.1:{self.port}; location / {{ {there} }} }}"


def answers(process: subprocess.Popen[bytes] | None, port: int, log: Path, host: str = "localhost") -> bool:
    """Return whether somebody listens on the port; fail the test with the log where the process ended."""
    assert process is not None
    assert process.poll() is None, log.read_text()
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
