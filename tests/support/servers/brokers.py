"""Real brokers for tests: mosquitto on a free loopback port, in its own folder, with or without TLS.

with Broker.in_folder(tmp_path) as broker: ...
secured = Broker.in_folder(tmp_path, secured=True)    # TLS, a user and a password
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgert.telemetry.mqtt import MqttSettings
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.servers.ports import free_port

USER = "pi-07"
SERVER = "server.test"  # for clients that are not on this machine
PASSWORD = "right horse"
BEGUN = datetime.timedelta(minutes=5)  # the age of new certificates


def mosquitto(tool: str = "mosquitto") -> str:
    """Return the path of mosquitto or one of its tools; fail the test if it is missing."""
    path = shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    assert path, f"{tool} is not installed, and these tests talk to a real broker: apt-get install mosquitto"
    return path


@dataclass
class Broker:
    """A mosquitto that can be stopped, killed and started again on the same port."""

    folder: Path
    port: int = field(default_factory=free_port)
    secured: bool = False
    extra: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def in_folder(cls, folder: Path, *, secured: bool = False, extra: tuple[str, ...] = ()) -> Broker:
        """Write the configuration; `start` or a `with` statement runs it."""
        folder.mkdir(parents=True, exist_ok=True)
        broker = cls(folder, secured=secured, extra=extra)
        if secured:
            write_authority_and_server(folder)
            (folder / "password").write_text(PASSWORD + "\n")
            # -b takes the password from argv: fine for a test's own.
            made = [mosquitto("mosquitto_passwd"), "-b", "-c", str(folder / "users"), USER, PASSWORD]
            subprocess.run(made, check=True, capture_output=True)
        return broker

    @property
    def settings(self) -> MqttSettings:
        """Return the settings with which a client reaches this broker."""
        if not self.secured:
            return MqttSettings("127.0.0.1", self.port)
        return MqttSettings(
            "localhost",
            self.port,
            tls=True,
            ca=str(self.folder / "ca.pem"),
            username=USER,
            password_file=str(self.folder / "password"),
        )

    def start(self) -> None:
        configuration = self.folder / "mosquitto.conf"
        configuration.write_text("\n".join(self._lines()) + "\n")
        with open(self.folder / "mosquitto.log", "ab") as log:
            self._process = subprocess.Popen([mosquitto(), "-c", str(configuration)], stdout=log, stderr=log)
        wait_until(self._answers, f"mosquitto listens on {self.port}; see {self.folder}/mosquitto.log")

    def stop(self) -> None:
        """Stop the broker by its pid if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_S_MAX)
            self._process = None

    def _lines(self) -> list[str]:
        lines = [
            f"listener {self.port} 127.0.0.1",
            "user root",
            "persistence false",
            "max_queued_messages 10000",
            *self.extra,
        ]
        if not self.secured:
            return [*lines, "allow_anonymous true"]
        return [
            *lines,
            "allow_anonymous false",
            f"password_file {self.folder}/users",
            f"certfile {self.folder}/server.pem",
            f"keyfile {self.folder}/server.key",
        ]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "mosquitto.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def write_authority_and_server(folder: Path) -> None:
    """Write `ca.pem`, and with keys `server.pem` (for localhost) and `client.pem` (for USER)."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _named("EdgeRT test authority")
    authority = (
        _certificate(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_ca_usage(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    for file, name in (("server", "localhost"), ("client", USER)):
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.DNSName(SERVER), x509.IPAddress(IPv4Address("127.0.0.1"))]
        certificate = (
            _certificate(_named(name), authority_name, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        (folder / f"{file}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{file}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


def _certificate(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEGUN)
        .not_valid_after(now - BEGUN + datetime.timedelta(hours=1))
    )


def _ca_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
