"""A transfer over a real sshd to the real `edgertd` sends only lacking files, and continues after a cut."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import DeviceUnreachable
from edgert.state_dir import StateDir
from edgert.versions.install import held_files
from edgert.versions.slot_store import SlotStore
from edgert_deploy.devices.claims import HeldClaim, claimed
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_login import LinkLimits
from edgert_deploy.rollout.delta import Deltas
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.transfer import Transfer
from hil.support.relay import Relay
from hil.support.sshd import SshDevice
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.releases import WEIGHTS_BYTES, bundle_of, deployed_state, slot, weights
from tests.support.stand_ins.forked_edgertd import EDGERTD, ForkedEdgertd

LINK = LinkLimits(connect_s=10, keepalive_s=1, dead_after_s=5.0, attempts=4, pauses_s=(0.05,))


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


@pytest.fixture
def state(key: SigningKey, tmp_path: Path, forked_edgertd: ForkedEdgertd) -> StateDir:
    """A device's state folder with a good release 1, and its `edgertd`, after a bootstrap and a deployment."""
    program = tmp_path / "home" / "venv" / "bin" / "edgertd"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(forked_edgertd.argv(EDGERTD))} "$@"\n')
    program.chmod(0o755)
    return deployed_state(tmp_path, key)


class World:
    """Transfers over one link. `said` has the lines of progress."""

    def __init__(self, sshd: SshDevice, state: StateDir, tmp_path: Path, port: int | None = None) -> None:
        self.state, self.deltas, self.said = state, Deltas(tmp_path / "cache"), list[str]()
        device = replace(sshd.device(port=port), state=str(state.root), home=str(tmp_path / "home"))
        self.transport = SshTransport(device, LINK)
        self.device, self.daemon = device, RemoteDaemon(self.transport, device, self.said.append)

    def transfer(self, bundle: Path) -> Transfer:
        request = DeployRequest(bundle, read_offer(bundle), 60.0, lambda _: self.transport, deltas=self.deltas)
        return Transfer(request, self.daemon, self.said.append)

    def send(self, bundle: Path, **changes: Any) -> Transfer:
        transfer = self.transfer(bundle)
        transfer.send(replace(self.daemon.status(), **changes))
        return transfer

    def deliver(self, bundle: Path, **changes: Any) -> Transfer:
        transfer = self.send(bundle, **changes)
        token = str(self.daemon.call("claim", "echo", "--by", "test")["token"])
        transfer.install(HeldClaim(self.daemon, token, self.daemon.status()))
        self.daemon.call("unclaim", token)
        assert list(self.state.incoming.iterdir()) == []
        return transfer


@pytest.fixture
def world(sshd: SshDevice, state: StateDir, tmp_path: Path) -> Iterator[World]:
    made = World(sshd, state, tmp_path)
    yield made
    made.transport.close()


def test_a_patch_gives_the_same_files_as_the_whole_bundle(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    second = bundle_of(tmp_path / "bundles", key, 2)
    whole = world.deliver(second, delta_format=0)  # a device that accepts no deltas gets the whole bundle
    by_bundle = slot(state)
    assert whole.sent_bytes == second.stat().st_size
    world.deltas.keep_bundle(tmp_path / "bundles" / "echo-1.edgert")
    SlotStore(state.models / "echo").rollback()
    planned = world.transfer(second).planned_bytes(world.daemon.status())  # the bytes that a dry run reports
    patched = world.deliver(second)
    assert slot(state) == by_bundle
    assert patched.sent_bytes == planned
    assert patched.sent_bytes < 0.15 * WEIGHTS_BYTES
    assert any("as a patch" in line for line in world.said)


def test_neither_files_that_the_device_has_nor_files_of_other_targets_are_sent(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    other = make_null_bundle(
        tmp_path / "bundles", key, release=2, op="copy", delay_s=0.001, padding=weights(1), foreign_bytes=500_000
    )
    transfer = world.deliver(other)
    assert transfer.sent_bytes < 20_000
    assert slot(state)["null/weights.bin"] == weights(1)


def test_the_claim_reports_the_files_of_the_device_even_if_its_slots_are_damaged(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    second = bundle_of(tmp_path / "bundles", key, 2)
    asked = list[str]()

    class Heard(RemoteDaemon):
        def call(self, *words: str, timeout_s: float = QUICK_S_MAX) -> dict[str, Any]:
            asked.append(words[0])
            return super().call(*words, timeout_s=timeout_s)

    world.daemon = Heard(world.transport, world.device)
    transfer = world.transfer(second)
    with claimed(world.daemon, "echo") as claim:
        transfer.send(claim.facts, claim.has)
        transfer.install(claim)
    assert asked == ["claim", "install", "unclaim"]
    assert slot(state)["null/weights.bin"] == weights(2)
    (state.models / "echo" / "state.json").write_text("nonsense")
    with claimed(world.daemon, "echo") as claim:
        assert claim.has is None


def test_a_damaged_slot_only_causes_a_transfer_of_the_whole_bundle(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    world.deltas.keep_bundle(tmp_path / "bundles" / "echo-1.edgert")
    old = held_files(state, "echo")[hashlib.sha256(weights(1)).hexdigest()]
    old.write_bytes(old.read_bytes()[:-1] + b"?")
    second = bundle_of(tmp_path / "bundles", key, 2)
    transfer = world.deliver(second)
    assert slot(state)["null/weights.bin"] == weights(2)
    assert second.stat().st_size < transfer.sent_bytes < 1.2 * second.stat().st_size
    assert any("sending the whole bundle instead" in line for line in world.said)


def test_after_cuts_at_random_bytes_no_byte_is_sent_twice(
    sshd: SshDevice, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    """A command continues its transfer after a cut. If the command gives up, the next command continues."""
    chance = random.Random(7)
    second = bundle_of(tmp_path / "bundles", key, 2)
    cuts = [chance.randrange(60_000, 400_000) for _ in range(8)]
    lost_max = 40_000  # per connection: the handshake, the commands, and the bytes that were not on the disk yet

    def stored() -> bool:
        on_disk = sum(path.stat().st_size for path in state.incoming.glob("*"))
        return relay.bytes_towards_server < on_disk + relay.connections * lost_max

    def wait_for_the_disk() -> None:
        """Wait until the device has written the received bytes, because its disk may have been slow."""
        with contextlib.suppress(AssertionError, FileNotFoundError):
            wait_until(stored, "what was sent is on disk", timeout_s=20, pause_s=0.01)

    with Relay(sshd.port, cut_after=cuts, bytes_per_s=2e6, before_cut=wait_for_the_disk) as relay:
        for _ in range(12):
            world = World(sshd, state, tmp_path, relay.port)
            done = False
            with contextlib.closing(world.transport), contextlib.suppress(DeviceUnreachable):
                world.deliver(second)
                done = True
            if done:
                break
        connections = relay.connections
        passed = relay.bytes_towards_server
    assert slot(state)["null/weights.bin"] == weights(2)
    assert connections > 4
    assert passed < second.stat().st_size + connections * lost_max


def test_damage_in_a_partial_file_of_an_earlier_attempt_is_found_and_sent_again(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    second = bundle_of(tmp_path / "bundles", key, 2)
    world.send(second)
    (arrived,) = state.incoming.iterdir()
    data = arrived.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    arrived.unlink()
    (state.incoming / f".{arrived.name}.{digest[:32]}.part").write_bytes(bytes(70_000))
    world.deliver(second)
    assert slot(state)["null/weights.bin"] == weights(2)


# --- hostile deltas ------------------------------------------------------------------------
