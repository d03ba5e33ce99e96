"""Devices that follow a channel, and the registry that they ask: bytes, requests and processor time.

A simulated follower is EdgeRT's registry client with a new TLS connection for each question, like a device. A real
follower is `edgertd follow` with its own state folder. The followers ask two servers in turn: Debian's docker-registry
with TLS and a login, and nginx as a caching mirror in front of it (examples/registry). Devices and servers share this
machine, so the wall times include the work of both. The processor times are those of the server alone. A device asks
`--asks` questions a day.

    python -m bench.pull                          # 500 simulated and 15 real devices, a release of 26 MB
    python -m bench.pull --simulated 50 --real 2 --json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.support.processes import cpu_us, processes
from bench.support.tables import emit
from edgert.bundle.channel import Entry
from edgert.bundle.signing import SigningKey, new_key
from edgert.registry.address import parse_repository
from edgert.registry.artifacts import read_channel
from edgert.registry.client import Registry
from edgert.registry.login import read_credentials
from edgert_deploy.rollout.channel_entries import with_release
from edgert_deploy.rollout.channels import Channels, SeenCounters
from edgert_deploy.rollout.publish import Release, publish
from hil.support.relay import Relay
from tests.support.bundles import make_null_bundle
from tests.support.paths import ROOT
from tests.support.servers.registries import Mirror, RegistryServer

CHANNEL, MODEL = "stable", "model"
COLUMNS = (
    *("server", "asks", "bytes_each", "kb_a_day", "server_ms_each", "downloads", "server_ms_a_download"),
    *("real_devices", "real_s", "real_mb"),
)


@dataclass(frozen=True)
class Place:
    """A server that devices ask, and the files with which they log in."""

    name: str
    port: int
    pid: int
    ca: Path
    login: Path | None

    def registry(self, port: int) -> Registry:
        repository = parse_repository(f"oci://localhost:{port}/plant/models")
        host = f"localhost:{self.port}"  # the login is for this port, even if a relay listens on `port`
        return Registry(repository, read_credentials(self.login, host), self.ca)

    def cpu_ms(self) -> float:
        """Return the processor time of the server so far."""
        return cpu_us(processes(self.pid)) / 1e3


@dataclass(frozen=True)
class Cost:
    """The cost of devices for one server. `*_each` is for one question, `kb_a_day` for all questions of a day."""

    server: str
    asks: int
    bytes_each: float
    kb_a_day: float
    server_ms_each: float
    downloads: int
    server_ms_a_download: float
    real_devices: int
    real_s: float
    real_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, default=500, help="questions to each server")
    parser.add_argument("--downloads", type=int, default=40, help="simulated downloads of the release from each server")
    parser.add_argument("--real", type=int, default=15, help="real followers")
    parser.add_argument("--mb", type=float, default=26.0, help="size of the release")
    parser.add_argument("--asks", type=int, default=24, help="questions of a device a day")
    parser.add_argument("--parallel", type=int, default=4, help="at a time")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as name, places(Path(name)) as (server, found):
        key = new_key()
        bundle = make_null_bundle(Path(name), key, MODEL, padding_bytes=int(options.mb * 1e6))
        release = offered(server, bundle, key, Path(name))
        rows = [cost(place, release, key, Path(name), options) for place in found]
    emit([{name: _rounded(value) for name, value in asdict(row).items()} for row in rows], COLUMNS, options.json)


@contextmanager
def places(folder: Path) -> Iterator[tuple[RegistryServer, list[Place]]]:
    """Run the servers that devices may ask."""
    with (
        RegistryServer.in_folder(folder / "registry", secured=True) as server,
        Mirror(folder / "mirror", server) as mirror,
    ):
        yield (
            server,
            [
                Place("docker-registry", server.port, server.pid, server.ca, server.login_file),
                Place("nginx mirror", mirror.port, mirror.pid, server.ca, None),
            ],
        )


def offered(server: RegistryServer, bundle: Path, key: SigningKey, folder: Path) -> Release:
    """Publish the bundle for every device of the channel."""
    registry = server.registry()
    release = publish(registry, bundle)
    entry = Entry(MODEL, 1, release.digest, release.envelope, release.oci_manifest)
    channels = Channels(registry, (key.public,), SeenCounters(folder / "seen"))
    channels.change(CHANNEL, lambda entries: with_release(entries, entry), key)
    return release


def cost(place: Place, release: Release, key: SigningKey, folder: Path, options: argparse.Namespace) -> Cost:
    found = read_channel(place.registry(place.port), CHANNEL)
    assert found is not None
    digest = found[0]

    def ask(_: int) -> None:
        registry = place.registry(place.port)
        assert read_channel(registry, CHANNEL, digest) is None
        registry.close()

    def fetch(number: int) -> None:
        registry, part = place.registry(place.port), folder / f"part-{number}"
        for blob in release.files:
            registry.download(blob, part)
            part.unlink()
        registry.close()

    fetch(0)  # the mirror has the release after this download
    said(f"{place.name}: {options.simulated} questions")
    ask_ms = spent(place, lambda: at_once(ask, options.simulated, options.parallel))
    said(f"{place.name}: {options.downloads} downloads")
    fetch_ms = spent(place, lambda: at_once(fetch, options.downloads, options.parallel))
    said(f"{place.name}: {options.real} real devices")
    real_s, real_bytes = real_devices(place, key, folder / place.name, options.real, options.parallel)
    bytes_each = bytes_of_a_question(place, digest)
    return Cost(
        server=place.name,
        asks=options.simulated,
        bytes_each=bytes_each,
        kb_a_day=bytes_each * options.asks / 1e3,
        server_ms_each=ask_ms / options.simulated,
        downloads=options.downloads,
        server_ms_a_download=fetch_ms / options.downloads,
        real_devices=options.real,
        real_s=real_s,
        real_mb=real_bytes / 1e6,
    )


def bytes_of_a_question(place: Place, digest: str) -> float:
    """Return the bytes of one question and its answer, both ways, with TLS and without the headers of TCP."""
    # The certificate is for the name, so a relay with another port can be between device and server. The login is for
    # the server's port.
    with Relay(place.port) as relay:
        registry = place.registry(relay.port)
        assert read_channel(registry, CHANNEL, digest) is None
        registry.close()
        time.sleep(0.2)  # in this time, the last bytes pass
        return float(relay.bytes_passed)


def real_devices(place: Place, key: SigningKey, folder: Path, count: int, parallel: int) -> tuple[float, float]:
    """Run `edgertd follow` once on each of `count` devices.

    Returns the seconds until all devices have installed the release, and the bytes that one device sent and received.
    """
    with Relay(place.port) as relay:
        states = [device(folder / f"d{i}", place, key, relay.port if i == 0 else place.port) for i in range(count)]

        def follow(number: int) -> None:
            words = ["--state", str(states[number]), "follow", "--json"]
            done = subprocess.run(
                [sys.executable, "-m", "edgert.cli", *words], capture_output=True, text=True, cwd=ROOT
            )
            installed = list((states[number] / "models" / MODEL).glob("*/null/weights.bin"))
            assert installed, done.stdout + done.stderr

        began_s = time.monotonic()
        at_once(follow, count, parallel)
        return time.monotonic() - began_s, float(relay.bytes_passed)


def device(state: Path, place: Place, key: SigningKey, port: int) -> Path:
    """Make the state folder of a device that follows the channel."""
    (state / "keys").mkdir(parents=True)
    (state / "keys" / "bench.pem").write_bytes(key.public.pem())
    lines = [f'device = "{state.name}"', 'profile = "this-machine"', "[follow]", f'channel = "{CHANNEL}"']
    lines += [f'registry = "oci://localhost:{port}/plant/models"', f'ca = "{place.ca}"']
    if place.login is not None:
        login = state / "login.json"
        login.write_text(place.login.read_text().replace(str(place.port), str(port)))
        lines.append(f'credentials = "{login}"')
    (state / "config.toml").write_text("\n".join(lines) + "\n")
    return state


def at_once(work: Callable[[int], None], count: int, parallel: int) -> None:
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(work, range(count)))


def spent(place: Place, work: Callable[[], None]) -> float:
    """Return the processor time in ms that the server spent on `work`."""
    before = place.cpu_ms()
    work()
    return place.cpu_ms() - before


def said(line: str) -> None:
    print(line, file=sys.stderr)


def _rounded(value: object) -> object:
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
