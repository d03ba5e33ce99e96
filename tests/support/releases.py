"""Releases of `echo` with large weights, of which one layer in twenty differs, and a device that has installed some."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgert.bundle.signing import SigningKey
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.bundles import make_null_bundle

WEIGHTS_BYTES = 1_000_000


def weights(release: int) -> bytes:
    """Return incompressible weights. Each release changes one layer in twenty."""
    data = bytearray(np.random.default_rng(0).bytes(WEIGHTS_BYTES))
    at = len(data) // 20 * release
    data[at : at + len(data) // 20] = np.random.default_rng(release).bytes(len(data) // 20)
    return bytes(data)


def bundle_of(folder: Path, key: SigningKey, release: int) -> Path:
    return make_null_bundle(folder, key, release=release, padding=weights(release))


def keep(state: StateDir, path: Path) -> None:
    install(path, state, read_config(state))
    store = SlotStore(state.models / "echo")
    store.activate(60)
    store.mark_good()


def deployed_state(folder: Path, key: SigningKey) -> StateDir:
    """Return a device's state folder after a bootstrap and a deployment of release 1."""
    made = StateDir(folder / "state")
    made.make()
    made.keys.mkdir()
    (made.keys / "test.pem").write_bytes(key.public.pem())
    made.config.write_text('device = "board"\nprofile = "this-machine"\n')
    keep(made, bundle_of(folder / "bundles", key, 1))
    return made


def slot(state: StateDir) -> dict[str, bytes]:
    """Return all files of the version that was installed last, by their paths."""
    store = SlotStore(state.models / "echo")
    folder = store.slot_folder(store.read().spare_slot)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
