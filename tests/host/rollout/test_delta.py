"""What is sent to a device: only what it lacks, as patches where it can, whole where nothing else works.

Over a real sshd with the real `edgertd`; hostile deltas at the device's own door.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.delta import MAGIC, Part, write_delta
from edgert.bundle.signing import SigningKey, new_key
from edgert.config import StateDir, read_config
from edgert.errors import BundleCorrupt, DeviceUnreachable, EdgeRTError, SignatureInvalid
from edgert.versions.install import held_files, install
from edgert.versions.slot_store import SlotStore
from edgert_deploy.devices.claims import HeldClaim
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_login import LinkLimits
from edgert_deploy.rollout.delta import Deltas, DeviceFiles
from edgert_deploy.rollout.object_cache import ObjectCache
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.transfer import Transfer
from hil.relay import Relay
from hil.sshd import SshDevice, running_sshd
from tests.support.bundles import make_null_bundle
from tests.support.paths import ROOT

WEIGHTS_BYTES = 1_000_000
LINK = LinkLimits(connect_s=10, keepalive_s=1, dead_after_s=5.0, attempts=4, pause_s=0.05)


def weights(release: int) -> bytes:
    """Incompressible; from release to release, one layer in twenty differs."""
    data = bytearray(np.random.default_rng(0).bytes(WEIGHTS_BYTES))
    at = len(data) // 20 * release
    data[at : at + len(data) // 20] = np.random.default_rng(release).bytes(len(data) // 20)
    return bytes(data)


def bundle_of(folder: Path, key: SigningKey, release: int) -> Path:
    return make_null_bundle(folder, key, release=release, padding=weights(release))


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def state(sshd: SshDevice, key: SigningKey, tmp_path: Path) -> StateDir:
    """A device's state folder with release 1 good, as a bootstrap and a deployment left it."""
    made = StateDir(tmp_path / "state")
    made.make()
    made.keys.mkdir()
    (made.keys / "test.pem").write_bytes(key.public.pem())
    made.config.write_text('device = "board"\nprofile = "this-machine"\n')
    keep(made, bundle_of(tmp_path / "bundles", key, 1))
    return made


def keep(state: StateDir, path: Path) -> None:
    install(path, state, read_config(state))
    store = SlotStore(state.models / "echo")
    store.activate(60)
    store.mark_good()


def slot(state: StateDir) -> dict[str, bytes]:
    """All files of the version that was installed last."""
    store = SlotStore(state.models / "echo")
    folder = store.slot_folder(store.read().spare_slot)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class World:
    """Transfers over one link; `said` are their lines."""

    def __init__(self, sshd: SshDevice, state: StateDir, tmp_path: Path, port: int | None = None) -> None:
        self.state, self.deltas, self.said = state, Deltas(tmp_path / "cache"), list[str]()
        device = replace(sshd.device(port=port), state=str(state.root), home=str(tmp_path / "home"))
        program = tmp_path / "home" / "venv" / "bin" / "edgertd"
        if not program.exists():
            program.parent.mkdir(parents=True)
            paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            program.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" -m edgert.cli "$@"\n')
            program.chmod(0o755)
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
        self.daemon.call("release", token)
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
    whole = world.deliver(second, delta_format=0)  # as to a device that knows no deltas
    by_bundle = slot(state)
    assert whole.sent_bytes == second.stat().st_size
    world.deltas.objects.keep_bundle(tmp_path / "bundles" / "echo-1.edgert")
    SlotStore(state.models / "echo").rollback()
    planned = world.transfer(second).planned_bytes(world.daemon.status())  # what a dry run counts
    patched = world.deliver(second)
    assert slot(state) == by_bundle
    assert patched.sent_bytes == planned
    assert patched.sent_bytes < 0.15 * WEIGHTS_BYTES
    assert any("as a patch" in line for line in world.said)


def test_what_is_there_is_not_sent_and_files_of_other_targets_neither(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    other = make_null_bundle(
        tmp_path / "bundles", key, release=2, op="copy", delay_s=0.001, padding=weights(1), foreign_bytes=500_000
    )
    transfer = world.deliver(other)
    assert transfer.sent_bytes < 20_000
    assert slot(state)["null/weights.bin"] == weights(1)


def test_a_rotted_slot_costs_a_whole_transfer_and_nothing_else(
    world: World, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    world.deltas.objects.keep_bundle(tmp_path / "bundles" / "echo-1.edgert")
    old = held_files(state, "echo")[hashlib.sha256(weights(1)).hexdigest()]
    old.write_bytes(old.read_bytes()[:-1] + b"?")
    second = bundle_of(tmp_path / "bundles", key, 2)
    transfer = world.deliver(second)
    assert slot(state)["null/weights.bin"] == weights(2)
    assert second.stat().st_size < transfer.sent_bytes < 1.2 * second.stat().st_size
    assert any("sending the whole bundle instead" in line for line in world.said)


def test_cuts_at_random_bytes_cost_no_byte_twice(
    sshd: SshDevice, state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    """Within one command the transfer goes on by itself; after it gave up, the next command goes on where it was."""
    chance = random.Random(7)
    second = bundle_of(tmp_path / "bundles", key, 2)
    cuts = [chance.randrange(60_000, 400_000) for _ in range(8)]
    with Relay(sshd.port, cut_after=cuts, bytes_per_s=2e6) as relay:
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
    # Each connection has its handshake and words; each cut may lose what was under way and not yet on disk.
    assert passed < second.stat().st_size + connections * 40_000


def test_damage_in_what_an_earlier_attempt_left_is_found_and_sent_anew(
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


def delta_of(bundle: Path, folder: Path, parts: list[tuple[Part, bytes]], **header: Any) -> Path:
    folder.mkdir(exist_ok=True)
    listed = []
    for number, (part, content) in enumerate(parts):
        (folder / str(number)).write_bytes(content)
        listed.append((part, folder / str(number)))
    with open_bundle(bundle, None) as opened, (folder / "delta").open("wb") as out:
        write_delta(out, opened.envelope.raw, listed)
    return folder / "delta"


def refused(state: StateDir, path: Path) -> EdgeRTError:
    before = SlotStore(state.models / "echo").read()
    with pytest.raises(EdgeRTError) as caught:
        install(path, state, read_config(state))
    assert SlotStore(state.models / "echo").read() == before
    assert not (state.models / "echo" / "stage").exists()
    return caught.value


def test_patches_that_lie_are_refused_and_nothing_is_installed(
    state: StateDir, key: SigningKey, tmp_path: Path
) -> None:
    second = bundle_of(tmp_path / "bundles", key, 2)
    want, old = (hashlib.sha256(weights(release)).hexdigest() for release in (2, 1))
    pack = zstandard.ZstdCompressor().compress
    truth = pack(weights(2))
    cases = {
        "other bytes": (Part(want, "zstd", 0), pack(weights(3))),
        "a bomb": (Part(want, "zstd", 0), pack(bytes(10**9))),
        "one byte more": (Part(want, "zstd", 0), pack(weights(2) + b"x")),
        "cut short": (Part(want, "zstd", 0), truth[:-100]),
        "more behind it": (Part(want, "zstd", 0), truth + b"x" * 10),
        "raw, too long": (Part(want, "raw", 0), weights(2) + b"x"),
        "no frame": (Part(want, "patch", 0, old), b"no frame at all"),
        "a base that is not here": (Part(want, "patch", 0, "0" * 64), truth),
    }
    for name, (part, content) in cases.items():
        path = delta_of(second, tmp_path / "hostile", [(replace(part, size_bytes=len(content)), content)])
        assert isinstance(refused(state, path), BundleCorrupt), name
    foreign = make_null_bundle(tmp_path / "foreign", new_key(), release=2, padding=weights(2))
    with open_bundle(foreign, None) as opened:
        parts = {e.sha256: opened.read_file(e.path, 10**8) for e in opened.manifest.files}
    path = delta_of(
        foreign, tmp_path / "hostile", [(Part(sha256, "raw", len(data)), data) for sha256, data in parts.items()]
    )
    assert isinstance(refused(state, path), SignatureInvalid)


def test_a_parcel_with_a_flipped_bit_or_cut_short_is_refused(state: StateDir, key: SigningKey, tmp_path: Path) -> None:
    first = bundle_of(tmp_path / "bundles", key, 1)
    second = make_null_bundle(tmp_path / "bundles", key, release=2, delay_s=0.001, padding=weights(1))
    with open_bundle(second, None) as opened, open_bundle(first, None) as before:
        target = opened.manifest.targets[0]
        files = tuple((e.path, e.sha256) for e in before.manifest.files)
    shipment = Deltas(tmp_path / "cache").make(second, target, DeviceFiles(files, zstd=True))
    good = shipment.path.read_bytes()
    chance, path = random.Random(3), tmp_path / "hostile.edgert"
    for _ in range(60):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        refused(state, path)
    for size in [*range(0, 64, 7), *(chance.randrange(len(good)) for _ in range(30))]:
        path.write_bytes(good[:size])
        refused(state, path)
    for header in (b"[]", b"{}", b"[" * 100_000, json.dumps({"envelope": -1, "parts": []}).encode()):
        path.write_bytes(MAGIC + struct.pack("<I", len(header)) + header)
        refused(state, path)
    path.write_bytes(good)
    assert install(path, state, read_config(state)).release == 2


# --- on the host ----------------------------------------------------------------------------


def test_the_same_need_gives_the_same_parcel_made_once(key: SigningKey, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, key, 1)
    with open_bundle(bundle, None) as opened:
        target = opened.manifest.targets[0]
    one, again = (Deltas(tmp_path / "one").make(bundle, target, DeviceFiles(zstd=True)) for _ in range(2))
    elsewhere = Deltas(tmp_path / "two").make(bundle, target, DeviceFiles(zstd=True))
    assert one == again
    assert one.path.read_bytes() == elsewhere.path.read_bytes()


def test_the_cache_keeps_to_its_bound_and_forgets_what_was_used_least(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "objects", bytes_max=250)
    for number, name in enumerate("abc"):
        with cache.workshop() as shop:
            (Path(shop) / "x").write_bytes(bytes(100))
            os.utime(cache.keep(name, Path(shop) / "x"), (number, number))
        cache.find("a")
    assert [cache.find(name) is not None for name in "abc"] == [True, False, True]
    assert cache.read("a") is None, "an object whose hash is not its name is none"
