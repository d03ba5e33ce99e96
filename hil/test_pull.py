"""A device without an inbound port: a container under systemd whose only way out is a registry with TLS and a login.

EDGERT_HIL_BREAKS=200 python -m pytest hil/test_pull.py -s      # minutes, with a link that breaks 200 times
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from edgert.checks.channel_status import ChannelStatus, read_channel_status
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots
from hil.support.containers import Container, running_container
from hil.support.dut import Dut, reached
from hil.support.host import Host
from hil.support.keys import greets
from hil.support.relay import Relay
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.servers.brokers import SERVER
from tests.support.servers.registries import RegistryServer

NAME, PROFILE, MODEL = "far", "generic-x86-64", "echo"
BREAKS = int(os.environ.get("EDGERT_HIL_BREAKS", "5"))
PIECE_BYTES = 16_000  # a connection breaks after this number of bytes, of which TLS uses a part
SETTLES_S_MAX = 900.0

pytestmark = pytest.mark.timeout(1200)


@dataclass
class World:
    """The host, the registry, the relay before the registry, and the device, whose files this machine can read."""

    host: Host
    server: RegistryServer
    relay: Relay
    container: Container

    def publish(self, release: int, *words: str, padding_bytes: int = 0) -> None:
        bundle = make_null_bundle(self.host.folder, self.host.key, MODEL, release, PROFILE, padding_bytes=padding_bytes)
        files = ("--registry-ca", self.server.ca, "--registry-login", self.server.login_file)
        reach = ("--registry", self.server.address, *files)
        self.host.edgert("publish", bundle, "--channel", "stable", "--watch", "1s", *words, *reach)

    @property
    def state(self) -> StateDir:
        return StateDir(self.container.root / "var/lib/edgert")

    @property
    def slots(self) -> Slots:
        return SlotStore(self.state.models / MODEL).read()

    def told(self) -> ChannelStatus:
        return read_channel_status(self.state, read_config(self.state))

    def wait_for(self, release: int) -> None:
        def kept() -> bool:
            live = self.slots.live
            return live is not None and live.release == release and live.good

        try:
            wait_until(kept, f"release {release} is kept", SETTLES_S_MAX, pause_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.told()}") from error


@pytest.fixture(scope="module")
def world(containers_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        server = stack.enter_context(RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True))
        container = stack.enter_context(running_container(tmp_path_factory.mktemp("device")))
        relay = stack.enter_context(Relay(server.port, address=container.host_ip))
        here, there = f"localhost:{server.port}", f"{SERVER}:{relay.port}"
        login = server.folder / "far.json"
        login.write_text(server.login_file.read_text().replace(here, there))
        with (container.root / "etc/hosts").open("a") as hosts:
            hosts.write(f"{container.host_ip} {SERVER}\n")
        host = Host(tmp_path_factory.mktemp("host"))
        host.edgert("keys", "new")
        host.add(reached(Dut(NAME, PROFILE), container))
        host.edgert(
            "bootstrap", NAME, "--engines", "null", "--follow", server.address.replace(here, there),
            "--registry-ca", server.ca, "--registry-login", login, "--set", "follow.interval_s=1",
        )  # fmt: skip
        container.allow_only(relay.port)
        yield World(host, server, relay, container)


def test_the_service_installs_a_release_with_a_login_that_only_systemd_can_read(world: World) -> None:
    assert not greets(world.container.ip, 22, 2), "no host reaches the device"
    world.publish(1)
    world.wait_for(1)
    login, kept = world.state.root / "registry-login", world.state.follow / "record.json"
    assert (login.stat().st_uid, login.stat().st_mode & 0o777) == (0, 0o600)
    assert kept.stat().st_uid != 0, "the round ran as the user of the service"


def test_a_release_that_breaks_a_limit_is_rolled_back_without_a_host(world: World) -> None:
    world.publish(2)
    world.wait_for(2)
    world.publish(3, "--limit", "min_requests=1000000")
    wait_until(lambda: world.slots.rolled_back is not None, "release 3 is rolled back", SETTLES_S_MAX, pause_s=0.2)
    world.wait_for(2)
    wait_until(lambda: "was rolled back" in "".join(world.told().steps), "the next round says so")
    assert world.told().wanted[MODEL].release == 3


def test_a_release_arrives_over_a_slow_link_that_loses_packets_and_breaks(world: World) -> None:
    """The link has 1 Mbit/s and 2 % loss. No byte arrives twice, except the bytes of a broken TLS record."""
    world.container.spoil(1000, 0.02)
    port = world.relay.port
    world.relay.close()
    size, begun_s = PIECE_BYTES * BREAKS, time.monotonic()
    world.publish(4, padding_bytes=size)
    cuts = [10**6, *[PIECE_BYTES] * BREAKS]  # the first connection, which asks for the channel, may pass more
    with Relay(world.server.port, port=port, address=world.container.host_ip, cut_answers_after=cuts) as relay:
        world.wait_for(4)
        took_s = time.monotonic() - begun_s
        print(f"\n{relay.connections} connections, {relay.bytes_passed} bytes for a release of {size}, {took_s:.0f} s")
        assert relay.connections > BREAKS / 2
        assert relay.bytes_passed < 2.5 * size + 400_000  # this includes the rounds without news before and after
