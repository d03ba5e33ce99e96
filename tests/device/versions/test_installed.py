"""An installed version: the live version, and its first artifact that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from edgert.bundle.manifest import ArtifactEntry
from edgert.config import read_config
from edgert.errors import BundleCorrupt, EngineFailed, ModelNotFound
from edgert.typed_json import TEXT_LENGTH_MAX
from edgert.versions.install import install
from edgert.versions.installed import TRIED_CHARS_MAX, InstalledVersion, check_files, first_working, load_live
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device, a_device


@pytest.fixture
def device() -> Iterator[Device]:
    with a_device(started=False) as made:
        yield made


@pytest.fixture
def version(device: Device) -> InstalledVersion:
    """A live version with two artifacts."""
    store, config = SlotStore(device.state.models / "echo"), read_config(device.state)
    with pytest.raises(ModelNotFound, match="no version of model echo is live"):
        load_live(store, config)
    install(device.bundle(), device.state, config)
    store.activate(60)
    live = load_live(store, config)
    return replace(live, artifacts=(replace(live.artifacts[0], id="preferred"), live.artifacts[0]))


def fails_on(*ids: str) -> tuple[list[str], Callable[[ArtifactEntry], str]]:
    asked: list[str] = []

    def use(artifact: ArtifactEntry) -> str:
        asked.append(artifact.id)
        if artifact.id in ids:
            raise EngineFailed(f"{artifact.id} does not load")
        return f"session of {artifact.id}"

    return asked, use


def test_the_preferred_artifact_is_used_if_it_works(version: InstalledVersion) -> None:
    asked, use = fails_on()
    working = first_working(version, use)
    assert (working.artifact.id, working.value, working.tried) == ("preferred", "session of preferred", ())
    assert asked == ["preferred"]


def test_the_next_artifact_is_used_if_the_preferred_one_fails_unless_strict_forbids_this(
    version: InstalledVersion,
) -> None:
    _, use = fails_on("preferred")
    working = first_working(version, use)
    assert (working.artifact.id, working.tried) == ("null", ("preferred: preferred does not load",))
    with pytest.raises(EngineFailed, match="preferred does not load"):
        first_working(version, use, strict=True)


def test_the_next_artifact_is_used_if_the_memory_is_too_small_for_the_preferred_one(version: InstalledVersion) -> None:
    def use(artifact: ArtifactEntry) -> None:
        if artifact.id == "preferred":
            raise MemoryError

    working = first_working(version, use)
    assert working.artifact.id == "null"
    (tried,) = working.tried
    assert tried.startswith("preferred: this device has too little free memory to load preferred: ")


def test_the_error_of_an_earlier_artifact_is_short_enough_for_every_message(version: InstalledVersion) -> None:
    def use(artifact: ArtifactEntry) -> None:
        if artifact.id == "preferred":
            raise EngineFailed("x" * TEXT_LENGTH_MAX)

    (tried,) = first_working(version, use).tried
    assert tried.startswith("preferred: xxx")
    assert len(tried) <= len("preferred: ") + TRIED_CHARS_MAX


def test_the_last_failure_is_raised_if_no_artifact_works(version: InstalledVersion) -> None:
    _, use = fails_on("preferred", "null")
    with pytest.raises(EngineFailed, match="null does not load"):
        first_working(version, use)


def test_a_file_that_changed_on_disk_is_refused(version: InstalledVersion) -> None:
    check_files(version, version.artifacts[1])
    (version.folder / version.artifacts[1].entry).write_bytes(b"{}")
    with pytest.raises(BundleCorrupt, match="deploy it again"):
        check_files(version, version.artifacts[1])
