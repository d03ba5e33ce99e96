"""The differences of two bundles, and the files that a device would fetch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert_deploy.cli import main
from edgert_deploy.packager.report.compare import compare
from tests.support.bundles import flip_bit, make_null_bundle


@pytest.fixture
def pair(signing_key: SigningKey, tmp_path: Path) -> tuple[Path, Path]:
    """Release 1, and 2 with another program and 50,000 bytes of ballast that does not compress."""
    return (
        make_null_bundle(tmp_path, signing_key, release=1),
        make_null_bundle(tmp_path, signing_key, release=2, op="copy", delay_s=0.5, padding_bytes=50_000),
    )


def test_the_fields_that_changed_are_named_by_what_they_belong_to(pair: tuple[Path, Path]) -> None:
    with open_bundle(pair[0], None) as before, open_bundle(pair[1], None) as after:
        changes = {change.field: (change.before, change.after) for change in compare(before, after).changes}
    assert changes["release"] == (1, 2)
    assert "files.null/model.json.sha256" in changes
    assert not any(field.startswith(("inputs", "outputs", "targets", "files.golden")) for field in changes)


def test_a_device_fetches_only_what_it_does_not_have(pair: tuple[Path, Path]) -> None:
    with open_bundle(pair[0], None) as before, open_bundle(pair[1], None) as after:
        (there,), (back,) = compare(before, after).fetches, compare(after, before).fetches
        (same,) = compare(after, after).fetches
        program = after.manifest.file("null/model.json").size_bytes
    assert (there.target, there.files, there.size_bytes) == ("this-machine", 2, program + 50_000)
    assert 50_000 < there.compressed_bytes < 50_200 + program
    assert there.size_bytes < there.whole_bytes
    assert back.files == 1
    assert (same.files, same.size_bytes, same.compressed_bytes) == (0, 0, 0)


def test_a_target_that_was_not_there_fetches_everything(signing_key: SigningKey, tmp_path: Path) -> None:
    one = make_null_bundle(tmp_path, signing_key, release=1)
    other = make_null_bundle(tmp_path, signing_key, release=2, profile="intel-nuc")
    with open_bundle(one, None) as before, open_bundle(other, None) as after:
        (fetch,) = compare(before, after).fetches
    assert fetch.size_bytes == fetch.whole_bytes > 0


def test_the_command_shows_the_changes(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "diff", *map(str, pair)]) == 0
    said = capsys.readouterr().out
    assert "release   1 -> 2" in said
    assert "fetch     this-machine: 50." in said
    assert main(["bundle", "diff", str(pair[0]), str(pair[0])]) == 0
    assert capsys.readouterr().out == "the same content\n"
    assert main(["bundle", "diff", *map(str, pair), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["same"], value["fetches"][0]["files"]) == (False, 2)
    assert main(["bundle", "diff", str(pair[0]), str(flip_bit(pair[1], -2000)), "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "bundle.corrupt"


def a_receipt(seven: float, **changes: Any) -> dict[str, Any]:
    classes = [{"name": "7", "samples": 50, "fp32": 0.98, "artifact": seven}, {"name": "8", "artifact": 0.9}]
    candidate = {
        "id": "null",
        "float_layers": [],
        "passed": True,
        "classes": classes,
        "slices": [],
        "tools": {"a": "1"},
    }
    value = {
        "format": 2,
        "gate": {"max_drop": 0.01},
        "targets": [{"profile": "box", "artifacts": ["null"]}],
        "notes": "",
    }
    return {**value, "candidates": [{**candidate, **changes}]}


def test_the_main_changes_of_receipts_are_shown_and_the_others_counted(
    signing_key: SigningKey, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = a_receipt(0.91, float_layers=["conv1"], tools={"a": "2"}) | {"gate": {"max_drop": 0.02}}
    one = make_null_bundle(tmp_path, signing_key, release=1, receipt=a_receipt(0.96))
    other = make_null_bundle(tmp_path, signing_key, release=2, receipt=after)
    assert main(["bundle", "diff", str(one), str(other)]) == 0
    said = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("receipt")]
    assert said == [
        "gate.max_drop: 0.01 -> 0.02",
        'candidates.null.float_layers: [] -> ["conv1"]',
        "candidates.null.classes.7: 0.9600 -> 0.9100 (-0.0500)",
        "1 other field changed: --json names them",
    ]
    assert main(["bundle", "diff", str(one), str(other), "--json"]) == 0
    assert "candidates.null.tools.a" in capsys.readouterr().out
