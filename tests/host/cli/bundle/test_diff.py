"""The output of `edgert bundle diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import SigningKey
from edgert_deploy.cli import main
from tests.support.bundles import flip_bit, make_null_bundle


@pytest.fixture
def pair(signing_key: SigningKey, tmp_path: Path) -> tuple[Path, Path]:
    """Releases 1 and 2. Release 2 has another program and 50,000 incompressible bytes."""
    return (
        make_null_bundle(tmp_path, signing_key, release=1),
        make_null_bundle(tmp_path, signing_key, release=2, op="copy", delay_s=0.5, padding_bytes=50_000),
    )


def test_the_command_shows_the_changes(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "diff", *map(str, pair)]) == 0
    said = capsys.readouterr().out
    assert "release   1 -> 2" in said
    assert "fetch     this-machine: 50." in said
    assert main(["bundle", "diff", str(pair[0]), str(pair[0])]) == 0
    assert capsys.readouterr().out == "the bundles have the same content\n"
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


def test_the_main_changes_of_receipts_are_shown_and_the_other_changes_are_counted(
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
