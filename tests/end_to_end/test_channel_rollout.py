"""Devices fetch a rollout themselves: the host's commands, a registry with TLS and a login, and real daemons.

The host never connects to a device, and no device connects to another device.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.channel import ChannelDevice, position
from edgert.bundle.signing import SigningKey
from edgert.versions.slot_store import SlotStore
from hil.support.relay import Relay
from tests.support.commands import Edgert, own_key
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until
from tests.support.servers.brokers import Broker
from tests.support.servers.registries import RegistryServer
from tests.support.stand_ins.following import followed, following

NAMES = ("d-0", "d-1", "d-2", "d-3")
BREAKS = 200
PIECE_BYTES = 16_000  # the bytes until a connection breaks; TLS needs some of them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True) as running:
        yield running


@pytest.fixture
def address(server: RegistryServer, tmp_path: Path) -> str:
    """The address of the test's own repository."""
    return f"oci://localhost:{server.port}/{tmp_path.name.replace('_', '-').strip('-').lower()}"


@pytest.fixture
def key(address: str, tmp_path: Path, server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """The key of the project that publishes to `address`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = own_key(tmp_path)
    (tmp_path / "edgert.toml").write_text(
        f'[registry]\naddress = "{address}"\nca = "{server.ca}"\nlogin = "{server.login_file}"\n'
    )
    return found


@pytest.fixture
def edgert(capfd: pytest.CaptureFixture[str]) -> Edgert:
    return Edgert(capfd)


def follow_config(server: RegistryServer, address: str, login: Path | None = None) -> str:
    lines = {"registry": address, "ca": server.ca, "credentials": login or server.login_file}
    return "[follow]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items())


def prepared(stack: ExitStack, name: str, key: SigningKey, follow: str) -> Device:
    """Return a device whose daemon runs. The test runs the follower's rounds, long before the daemon would."""
    device = stack.enter_context(a_device(follow, started=False))
    (device.state.keys / "test.pem").write_bytes(key.public.pem())
    device.key = key
    device.state.config.write_text(device.state.config.read_text().replace('"d-test"', f'"{name}"'))
    device.start()
    return device


def follow(device: Device) -> str:
    """Run rounds until no version is on trial; return the text of the last round."""
    store, follower = SlotStore(device.state.models / "echo"), following(device)

    def settled() -> bool:
        followed(follower)
        return not store.read().on_trial

    wait_until(settled, "the device has decided", 120.0, pause_s=0.2)
    return followed(follower)[0]


def releases(devices: dict[str, Device]) -> dict[str, int]:
    found = {name: SlotStore(device.state.models / "echo").read().live for name, device in devices.items()}
    return {name: live.release for name, live in found.items() if live is not None}


@pytest.mark.timeout(900)
def test_a_broken_release_is_rolled_back_on_the_canary_alone_and_the_fixed_release_reaches_all(
    server: RegistryServer, address: str, key: SigningKey, edgert: Edgert
) -> None:
    first, second = sorted(position(ChannelDevice("default", name, "this-machine"), "echo", 2) for name in NAMES)[:2]
    share = ("--share", f"{50 * (first + second):.4f}%")  # the hash selects exactly one device
    with ExitStack() as stack:
        devices = {name: prepared(stack, name, key, follow_config(server, address)) for name in NAMES}
        a_bundle = devices["d-0"]
        assert edgert("publish", a_bundle.bundle(release=1), "--channel", "stable", "--watch", "1s")[0] == 0
        for device in devices.values():
            assert follow(device) == "release 1 of echo is live"

        broken = ("--limit", "min_requests=1000000", "--watch", "1s")
        assert edgert("publish", a_bundle.bundle(release=2), "--channel", "stable", *share, *broken)[0] == 0
        rolled_back = {name for name, device in devices.items() if "rolled back" in follow(device)}
        assert len(rolled_back) == 1
        assert set(releases(devices).values()) == {1}

        assert edgert("channel", "halt", "stable", "echo")[0] == 0
        fixed = ("--share", "100%", "--watch", "1s")
        assert edgert("publish", a_bundle.bundle(release=3), "--channel", "canary", "--watch", "1s")[0] == 0
        for device in devices.values():
            assert "release 3" not in follow(device), "nobody follows canary here"
        assert edgert("promote", "echo", "--from", "canary", "--to", "stable", *fixed)[0] == 0
        for device in devices.values():
            assert follow(device) == "release 3 of echo is live"
        assert releases(devices) == dict.fromkeys(NAMES, 3)


@pytest.mark.timeout(900)
def test_a_release_arrives_over_a_link_that_breaks_200_times_and_no_byte_is_sent_twice(
    server: RegistryServer, address: str, key: SigningKey, edgert: Edgert
) -> None:
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(server.port, cut_answers_after=[10**6] + [PIECE_BYTES] * BREAKS))
        login = server.folder / "through-relay.json"
        login.write_text(server.login_file.read_text().replace(str(server.port), str(relay.port)))
        far = address.replace(str(server.port), str(relay.port))
        device = prepared(stack, "d-far", key, follow_config(server, far, login))
        size = PIECE_BYTES * BREAKS
        bundle = device.bundle(release=5, padding_bytes=size)
        assert edgert("publish", bundle, "--channel", "stable", "--watch", "1s")[0] == 0
        assert follow(device) == "release 5 of echo is live"
        assert relay.connections > BREAKS / 2
        assert relay.bytes_passed < 2.5 * size


@contextmanager
def recorded(broker: Broker, store: Path) -> Iterator[None]:
    """Run `edgert fleet record`."""
    words = ["fleet", "record", "--broker", broker.settings.address, "--store", str(store)]
    with open(store.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "edgert_deploy.cli", *words], stdout=log, stderr=log)
    try:
        said = store.with_suffix(".log")
        wait_until(lambda: "recording from" in said.read_text(), "the recorder has subscribed")
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S_MAX)


@pytest.mark.timeout(900)
def test_a_release_is_halted_by_the_reports_of_devices(
    server: RegistryServer, address: str, key: SigningKey, edgert: Edgert, tmp_path: Path
) -> None:
    store = tmp_path / "fleet.db"
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.in_folder(tmp_path / "broker"))
        stack.enter_context(recorded(broker, store))
        mqtt = f'[serving]\nwindow_s = 0.5\n[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'
        device = prepared(stack, "d-0", key, mqtt + follow_config(server, address))
        good = ("--channel", "stable", "--watch", "1s")
        assert edgert("publish", device.bundle(release=1), *good)[0] == 0
        assert follow(device) == "release 1 of echo is live"
        wait_until(lambda: reported(edgert, store)["kept"] == 1, "the device reports that it kept release 1")
        assert edgert("publish", device.bundle(release=2), *good, "--limit", "min_requests=1000000")[0] == 0
        assert "rolled back" in follow(device)
        wait_until(
            lambda: reported(edgert, store)["rolled_back"] == 1, "the device reports that it rolled release 2 back"
        )
        assert "min_requests" in reported(edgert, store)["failed"][0]["reason"]
        code, answer = edgert("channel", "watch", "stable", "--store", store)
        assert (code, answer["halted"]) == (9, ["echo"])
        assert edgert("channel", "show", "stable")[1]["channel"]["entries"][0]["halted"]


def reported(edgert: Edgert, store: Path) -> dict[str, Any]:
    """Return the progress of the channel's newest release."""
    code, answer = edgert("channel", "show", "stable", "--fleet", "--store", store)
    assert code == 0, answer
    newest: dict[str, Any] = answer["releases"][0]
    return newest
