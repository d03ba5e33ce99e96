"""Hostile bundles: each is refused with its own error, nothing goes live, nothing is written elsewhere.

tests/device/bundle/test_bundle_file.py flips every byte of a bundle and cuts it at every offset; these tests check
what an install leaves behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.bundle_file import ENVELOPE_BYTES_MAX, open_bundle
from edgert.bundle.envelope import ENVELOPE_NAME, sign
from edgert.bundle.expiry import expiry_time
from edgert.bundle.manifest import FILE_BYTES_MAX
from edgert.bundle.signing import SigningKey, new_key
from edgert.config import read_config
from edgert.errors import (
    BundleCorrupt,
    BundleError,
    BundleExpired,
    EdgeRTError,
    ReleaseTooOld,
    SignatureInvalid,
    StorageFailed,
)
from edgert.versions.install import install
from edgert.versions.installed import load_live
from edgert.versions.latest_time import LatestTime
from edgert.versions.slot_store import SlotStore
from tests.support.bundles import make_null_bundle
from tests.support.devices import Device
from tests.support.paths import IN_MEMORY

PAYLOAD_FLIPS = 10_000
PAYLOAD_FLIPS_INSTALLED = 100
CUTS_BELOW = 4096
SEED = 20261121
BLOCK = 512


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, because these tests try to install 6,000 bundles."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device with release 3 of `echo` live."""
    device = Device(tmp_path / "device")
    device.prepare()
    install(device.bundle(release=3), device.state, read_config(device.state))
    store = SlotStore(device.state.models / "echo")
    store.activate(60)
    store.mark_good()
    return device


def everything(folder: Path) -> dict[str, str]:
    """Return every file, folder and link below `folder` with its content, except locks."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and not path.name.endswith("lock"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir():
            found[name] = "folder"
    return found


def refused(device: Device, bundle: Path, error: type[EdgeRTError] | tuple[type[EdgeRTError], ...]) -> None:
    """Assert that the device refuses the bundle, and that no file of the device changes."""
    world = device.folder.parent
    before = everything(world)
    with pytest.raises(error):
        install(bundle, device.state, read_config(device.state))
    assert everything(world) == before


def all_refused(device: Device, folder: Path, bundles: Iterable[bytes]) -> None:
    """Do the same as `refused` for many bundles; check the device once at the end."""
    path, config = folder / "hostile.edgert", read_config(device.state)
    path.touch()
    before = everything(device.folder.parent).keys(), everything(device.folder)
    for data in bundles:
        path.write_bytes(data)
        with pytest.raises(BundleError):
            install(path, device.state, config)
    assert (everything(device.folder.parent).keys(), everything(device.folder)) == before


def test_ten_thousand_flipped_bits_in_the_payload_are_all_noticed(tmp_path: Path, signing_key: SigningKey) -> None:
    path = make_null_bundle(tmp_path, signing_key, padding_bytes=16 * 1024)
    with open_bundle(path, (signing_key.public,)) as bundle:
        start = bundle._payload_start
    whole, chance = path.read_bytes(), random.Random(SEED)
    with path.open("r+b", buffering=0) as file:
        for _ in range(PAYLOAD_FLIPS):
            at, bit = chance.randrange(start, len(whole)), 1 << chance.randrange(8)
            os.pwrite(file.fileno(), bytes([whole[at] ^ bit]), at)
            with pytest.raises(BundleCorrupt), open_bundle(path, None) as bundle:
                bundle.verify_files()
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    with open_bundle(path, (signing_key.public,)) as bundle:
        bundle.verify_files()


def test_a_bundle_with_a_flipped_bit_leaves_no_file(device: Device, tmp_path: Path) -> None:
    """The test flips bits in the envelope's header, the envelope, its padding, and some of the payload."""
    new = make_null_bundle(tmp_path / "new", device.key, release=4, padding_bytes=4096)
    whole, chance = new.read_bytes(), random.Random(SEED)
    with open_bundle(new, None) as bundle:
        start = bundle._payload_start
    places = [*range(start), *(chance.randrange(start, len(whole)) for _ in range(PAYLOAD_FLIPS_INSTALLED))]
    all_refused(device, tmp_path, (whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in places))


def test_a_bundle_that_is_cut_anywhere_leaves_no_file(device: Device, tmp_path: Path) -> None:
    whole = make_null_bundle(tmp_path / "new", device.key, release=4).read_bytes()
    assert len(whole) > CUTS_BELOW
    lengths = [*range(CUTS_BELOW + 1), *range(CUTS_BELOW, len(whole), 149)]
    all_refused(device, tmp_path, (whole[:length] for length in lengths))


def test_a_bundle_joined_from_parts_of_two_bundles_is_refused(device: Device, tmp_path: Path) -> None:
    """Two bundles with the same names and sizes, both signed, are cut and joined at every block."""
    one = make_null_bundle(tmp_path / "one", device.key, release=4, padding_bytes=2048).read_bytes()
    two = make_null_bundle(tmp_path / "two", device.key, release=5, padding_bytes=2048).read_bytes()
    assert len(one) == len(two)
    path = tmp_path / "mixed.edgert"
    for at in range(BLOCK, len(one), BLOCK):
        for first, second in ((one, two), (two, one)):
            mixed = first[:at] + second[at:]
            if mixed not in (one, two):  # the two bundles end with the same zeros
                path.write_bytes(mixed)
                refused(device, path, BundleError)


def test_a_replayed_older_release_is_refused(device: Device, tmp_path: Path) -> None:
    refused(device, make_null_bundle(tmp_path / "old", device.key, release=2), ReleaseTooOld)
    refused(device, make_null_bundle(tmp_path / "same", device.key, release=3, op="sum"), BundleError)


def test_an_expired_bundle_is_refused_and_an_installed_one_serves(device: Device, tmp_path: Path) -> None:
    path = make_null_bundle(tmp_path / "timed", device.key, release=4, expires="2027-02-19T08:00:00Z")
    over_s = expiry_time("2027-02-19T08:00:00Z")
    config, before = read_config(device.state), everything(device.state.models / "echo")
    with pytest.raises(BundleExpired, match=r"release 4 of echo expired at 2027-02-19T08:00:00Z; the time is"):
        install(path, device.state, config, latest=LatestTime(device.state, lambda: over_s))
    assert everything(device.state.models / "echo") == before
    install(path, device.state, config, latest=LatestTime(device.state, lambda: over_s - 1))
    store = SlotStore(device.state.models / "echo")
    store.activate(60)
    store.mark_good()
    version = load_live(store, config)
    assert version.manifest.expires == "2027-02-19T08:00:00Z", "loading asks no clock"
    for text in ("soon", "2027-02-19", "2027-2-19T08:00:00Z", "2027-02-30T08:00:00Z"):
        wrong = signed(path, device.key, lambda value, text=text: value.update(expires=text))  # type: ignore[misc]
        with pytest.raises(BundleError, match="expires"):
            install(wrong, device.state, config)


def test_an_untrusted_key_is_refused(device: Device, tmp_path: Path) -> None:
    refused(device, make_null_bundle(tmp_path / "foreign", new_key(), release=4), SignatureInvalid)


# --- bundles with a trusted signature, as from a compromised host ---------------------------------------------------


def signed(path: Path, key: SigningKey, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a bundle whose manifest `change` changed, with each file under the claimed name and size."""
    source = make_null_bundle(path.parent / "source", key, release=4)
    with open_bundle(source, None) as bundle:
        value = json.loads(bundle.envelope.payload)
        start = bundle._payload_start
    files = source.read_bytes()[start:]
    change(value)
    envelope = sign(json.dumps(value).encode(), key)
    path.write_bytes(header(ENVELOPE_NAME, len(envelope)) + envelope + bytes(-len(envelope) % BLOCK) + files)
    return path


def header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)[-BLOCK:]


@pytest.mark.parametrize(
    "name",
    ["../evil", "a/../../../evil", "/tmp/edgert-evil", "null/../../evil", "./evil", "a//evil", "..", ".", "", "a\0b", "a\nb",
     "manifest.dsse.json", "state.json/x"],
)  # fmt: skip
def test_a_signed_path_outside_the_slot_is_refused(device: Device, tmp_path: Path, name: str) -> None:
    def rename(value: dict[str, Any]) -> None:
        value["files"][-1]["path"] = name
        for artifact in value["artifacts"]:
            artifact["files"] = [name]
            artifact["entry"] = name

    refused(device, signed(tmp_path / "evil.edgert", device.key, rename), BundleError)
    assert not Path("/tmp/edgert-evil").exists()


@pytest.mark.parametrize("size", [FILE_BYTES_MAX, FILE_BYTES_MAX + 1, -1, 2**63])
def test_a_signed_size_beyond_the_disk_is_refused_before_the_first_byte(
    device: Device, tmp_path: Path, size: int
) -> None:
    def grow(value: dict[str, Any]) -> None:
        value["files"][-1]["size_bytes"] = size

    refused(device, signed(tmp_path / "bomb.edgert", device.key, grow), (BundleError, StorageFailed))


def test_an_envelope_or_a_tail_that_is_too_large_is_refused_unread(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "bomb.edgert"
    for claimed in (ENVELOPE_BYTES_MAX + 1, 8**11 - 1):
        path.write_bytes(header(ENVELOPE_NAME, claimed))
        with path.open("r+b") as file:
            file.truncate(2**40)  # sparse: a terabyte that needs no space
        with pytest.raises(BundleCorrupt):
            install(path, device.state, read_config(device.state))
    whole = make_null_bundle(tmp_path / "new", device.key, release=4)
    with whole.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(BundleCorrupt, match="follow the end"):
        install(whole, device.state, read_config(device.state))
    assert SlotStore(device.state.models / "echo").read().ratchet == 3


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"x", b"g", b"S"])
def test_only_regular_files_are_accepted(device: Device, tmp_path: Path, kind: bytes) -> None:
    """The test tries links, device nodes, a folder, a pipe, and headers that rename or inflate the next entry."""
    path = make_null_bundle(tmp_path / "new", device.key, release=4)
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        offsets = [member.offset for member in archive.getmembers()]
    for at in offsets:
        entry = tarfile.TarInfo.frombuf(bytes(data[at : at + BLOCK]), "utf-8", "strict")
        entry.type, entry.linkname = kind, "/etc/passwd"
        changed = bytearray(data)
        changed[at : at + BLOCK] = entry.tobuf(tarfile.USTAR_FORMAT)[:BLOCK]
        path.write_bytes(changed)
        refused(device, path, BundleError)


@pytest.mark.parametrize("name", ["stage", "b"])
def test_a_link_in_the_stage_folder_is_not_followed(device: Device, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("untouched")
    model = device.state.models / "echo"
    (model / name).symlink_to(victim)
    bundle = make_null_bundle(tmp_path / "new", device.key, release=4)
    with pytest.raises(StorageFailed):
        install(bundle, device.state, read_config(device.state))
    assert everything(victim) == {"precious": hashlib.sha256(b"untouched").hexdigest()}
    assert SlotStore(model).read().live_slot == "a"
