"""The differences of two bundles, and the files that a device fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert_deploy.packager.report.compare import compare
from tests.support.bundles import make_null_bundle


@pytest.fixture
def pair(signing_key: SigningKey, tmp_path: Path) -> tuple[Path, Path]:
    """Return release 1, and release 2 with another program and 50,000 bytes that do not compress."""
    return (
        make_null_bundle(tmp_path, signing_key, release=1),
        make_null_bundle(tmp_path, signing_key, release=2, op="copy", delay_s=0.5, padding_bytes=50_000),
    )


def test_each_changed_field_is_named_with_the_part_that_it_belongs_to(pair: tuple[Path, Path]) -> None:
    with open_bundle(pair[0], None) as before, open_bundle(pair[1], None) as after:
        changes = {change.field: (change.before, change.after) for change in compare(before, after).changes}
    assert changes["release"] == (1, 2)
    assert "files.null/model.json.sha256" in changes
    assert not any(field.startswith(("inputs", "outputs", "targets", "files.golden")) for field in changes)


def test_a_device_fetches_only_the_files_that_it_lacks(pair: tuple[Path, Path]) -> None:
    with open_bundle(pair[0], None) as before, open_bundle(pair[1], None) as after:
        (there,), (back,) = compare(before, after).fetches, compare(after, before).fetches
        (same,) = compare(after, after).fetches
        program = after.manifest.file("null/model.json").size_bytes
    assert (there.target, there.files, there.size_bytes) == ("this-machine", 2, program + 50_000)
    assert 50_000 < there.compressed_bytes < 50_200 + program
    assert there.size_bytes < there.whole_bytes
    assert back.files == 1
    assert (same.files, same.size_bytes, same.compressed_bytes) == (0, 0, 0)


def test_a_new_target_fetches_everything(signing_key: SigningKey, tmp_path: Path) -> None:
    one = make_null_bundle(tmp_path, signing_key, release=1)
    other = make_null_bundle(tmp_path, signing_key, release=2, profile="intel-nuc")
    with open_bundle(one, None) as before, open_bundle(other, None) as after:
        (fetch,) = compare(before, after).fetches
    assert fetch.size_bytes == fetch.whole_bytes > 0
