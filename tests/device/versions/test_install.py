"""An install refuses bad bundles and keeps the live version.

For kills and full disks during an install, see tests/device/versions/test_crash_points.py.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.config import read_config
from edgert.durable import sha256_of
from edgert.errors import (
    BundleCorrupt,
    BundleError,
    ConfigInvalid,
    EdgeRTError,
    EngineMissing,
    NotCompatible,
    ReleaseTooOld,
    SignatureInvalid,
    TransitionRefused,
)
from edgert.state_dir import StateDir
from edgert.versions.install import install
from edgert.versions.installed import check_files, load_live, load_version
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import SlotState
from tests.support.bundles import flip_bit, make_null_bundle
from tests.support.devices import Device


@pytest.fixture
def device(tmp_path: Path) -> Device:
    device = Device(tmp_path)
    device.prepare()
    return device


def install_on(device: Device, bundle: Path) -> None:
    install(bundle, device.state, read_config(device.state))


def keep(device: Device, **options: object) -> None:
    install_on(device, device.bundle(**options))
    store = store_of(device)
    store.activate(60)
    store.mark_good()


def store_of(device: Device) -> SlotStore:
    return SlotStore(device.state.models / "echo")


def active_release(state: StateDir) -> int | None:
    """Check every byte of the live version and return its release."""
    store = SlotStore(state.models / "echo")
    slots = store.read()
    if slots.live is None:
        return None
    version = load_version(store.live_folder(slots), slots.live.digest, read_config(state))
    for artifact in version.artifacts:
        check_files(version, artifact)
    return slots.live.release


def test_the_installation_of_the_live_bundle_changes_nothing(device: Device) -> None:
    bundle = device.bundle()
    install_on(device, bundle)
    store_of(device).activate(60)
    store_of(device).mark_good()
    before = store_of(device).read()
    assert install(bundle, device.state, read_config(device.state)).already_live
    assert store_of(device).read() == before


def test_an_install_removes_compiled_files_and_measurements_of_versions_that_the_device_no_longer_has(
    device: Device,
) -> None:
    compiled, learned = device.state.cache, device.state.learned
    compiled.mkdir()
    learned.mkdir()
    keep(device, release=1)
    keep(device, release=2, op="sum")
    artifacts = [sha256_of(path) for path in device.state.models.glob("echo/?/null/model.json")]
    slots = store_of(device).read()
    versions = [version.digest for version in (slots.a, slots.b) if version is not None]
    kept = [
        "timing-trt11-sm8.7.cache",
        "engines.json",
        *(f"{sha256}{ending}" for sha256 in artifacts for ending in ("", "-trt11-sm8.7-b32.plan")),
        *(f"{sha256[:32]}.json" for sha256 in artifacts),
        *(f"{digest[:32]}.size.json" for digest in versions),
    ]
    removed = [
        f"{'0' * 64}-trt10-sm8.7-b32.plan",
        f"{'0' * 32}.json",
        f".{'0' * 32}.json.7.new",
        f"{'1' * 32}.size.json",
    ]
    for name in (*kept, *removed):
        (learned if name.endswith(("json", "new")) else compiled).joinpath(name).write_bytes(b"")
    (compiled / ("1" * 64)).mkdir()
    (compiled / ("1" * 64) / "model.blob").write_bytes(b"")
    install_on(device, device.bundle(release=3, op="zeros"))
    assert {path.name for folder in (compiled, learned) for path in folder.iterdir()} == set(kept)


def refusals(device: Device) -> dict[str, tuple[Path, type[EdgeRTError]]]:
    folder, key = device.folder / "bad", device.key
    return {
        "flipped bit": (flip_bit(make_null_bundle(folder, key, release=5)), BundleCorrupt),
        "wrong key": (make_null_bundle(folder / "k", new_key(), release=5), SignatureInvalid),
        "older release": (make_null_bundle(folder, key, release=2), ReleaseTooOld),
        "reused release": (make_null_bundle(folder / "r", key, release=3, op="sum"), BundleError),
        "other profile": (make_null_bundle(folder / "p", key, release=5, profile="intel-nuc"), NotCompatible),
        "other processor": (make_null_bundle(folder / "m", key, release=5, machines=("mips",)), NotCompatible),
        "missing file": (folder / "nothing.edgert", BundleCorrupt),
        "a folder": (folder, BundleCorrupt),
    }


@pytest.mark.parametrize("name", ["flipped bit", "wrong key", "older release", "reused release", "other profile",
                                  "other processor", "missing file", "a folder"])  # fmt: skip
def test_a_bad_bundle_is_refused_with_its_own_error_and_the_slots_stay_unchanged(device: Device, name: str) -> None:
    keep(device, release=3)
    before = store_of(device).read()
    path, error = refusals(device)[name]
    with pytest.raises(error):
        install_on(device, path)
    assert store_of(device).read() == before
    assert active_release(device.state) == 3
    assert not (store_of(device).folder / "stage").exists()


def test_a_signed_downgrade_is_installed(device: Device) -> None:
    keep(device, release=3)
    keep(device, release=2, downgrade_from=3, expires="2100-01-01T00:00:00Z")
    assert active_release(device.state) == 2


def test_an_installation_during_a_trial_is_refused(device: Device) -> None:
    install_on(device, device.bundle())
    store_of(device).activate(60)
    with pytest.raises(TransitionRefused):
        install_on(device, device.bundle(release=2))


def test_a_release_that_becomes_too_old_during_its_installation_is_refused(device: Device) -> None:
    """Another command keeps a newer release, which was staged, while this release is unpacked."""
    keep(device, release=1)
    older, store = device.bundle(release=2), store_of(device)
    install_on(device, device.bundle(release=3))

    def keep_the_staged_release(line: str) -> None:
        if line.startswith("unpacking"):
            store.activate(60)
            store.mark_good()

    with pytest.raises(ReleaseTooOld):
        install(older, device.state, read_config(device.state), keep_the_staged_release)
    spare = store.read().spare
    assert (active_release(device.state), spare and spare.release) == (3, 1)


def test_a_device_without_keys_refuses_every_bundle(device: Device) -> None:
    (device.state.keys / "test.pem").unlink()
    with pytest.raises(ConfigInvalid, match="bootstrap"):
        install_on(device, device.bundle())


def test_the_reference_of_a_bundle_is_installed_and_never_serves_as_a_fallback(device: Device) -> None:
    install_on(device, device.bundle(reference={"op": "copy"}))
    store = store_of(device)
    store.activate(60)
    store.mark_good()
    version = load_live(store, read_config(device.state))
    assert version.reference is not None
    check_files(version, version.reference)
    assert [artifact.id for artifact in version.artifacts] == ["null"]
    keep(device, release=2)
    assert not (store.live_folder(store.read()) / "reference").exists()


def test_an_artifact_that_was_damaged_on_disk_is_refused(device: Device) -> None:
    keep(device)
    (store_of(device).slot_folder("a") / "null/model.json").write_text("{}")
    with pytest.raises(BundleCorrupt, match="deploy it again"):
        active_release(device.state)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_a_missing_engine_is_named_and_nothing_is_installed(device: Device) -> None:
    with pytest.raises(EngineMissing, match="tensorrt"):
        install_on(device, device.bundle(engine="tensorrt"))
    assert store_of(device).read().state is SlotState.EMPTY


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_an_engine_that_cannot_prepare_is_skipped_and_named(device: Device) -> None:
    bundle = device.bundle(first=("tensorrt", b"a graph"))
    lines: list[str] = []
    install(bundle, device.state, read_config(device.state), lines.append)
    assert any("first cannot serve here" in line and "tensorrt is not installed" in line for line in lines)
    assert store_of(device).read().state is SlotState.FIRST_STAGED


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_a_strict_device_refuses_a_bundle_whose_first_engine_cannot_prepare(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.prepare("[serving]\nstrict = true\n")
    with pytest.raises(EngineMissing):
        install_on(device, device.bundle(first=("tensorrt", b"a graph")))


def test_an_installation_imports_no_numpy(device: Device) -> None:
    """The import of NumPy takes as long as the rest of an install, half a second on a small board."""
    program = "import sys; from edgert.cli import main; print(main(), 'numpy' in sys.modules)"
    words = [sys.executable, "-c", program, "--state", str(device.state.root), "install", str(device.bundle())]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
