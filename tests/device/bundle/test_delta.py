"""Hostile deltas: the device refuses them, and installs nothing."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.delta import MAGIC, Part, write_delta
from edgert.bundle.signing import SigningKey, new_key
from edgert.config import read_config
from edgert.errors import BundleCorrupt, EdgeRTError, SignatureInvalid
from edgert.state_dir import StateDir
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from edgert_deploy.rollout.delta import Deltas, DeviceFiles
from tests.support.bundles import make_null_bundle
from tests.support.releases import bundle_of, deployed_state, weights


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


@pytest.fixture
def state(key: SigningKey, tmp_path: Path) -> StateDir:
    return deployed_state(tmp_path, key)


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


def test_patches_with_false_values_are_refused_and_no_version_is_installed(
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


def test_a_delta_with_a_flipped_bit_or_cut_short_is_refused(state: StateDir, key: SigningKey, tmp_path: Path) -> None:
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
