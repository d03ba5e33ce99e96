"""The meaning of a bundle's inputs and outputs: the terminal and the page show the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.rules import Classify
from edgert.bundle.signing import SigningKey
from edgert_deploy.cli import main
from edgert_deploy.packager.report.meaning import meaning
from tests.support.bundles import make_null_bundle

RULE = Classify("y", ("idle", "worn", "off"), threshold=(0.5, 0.7, 0.5), none=("off",))
RULE_TEXT = "y: top 1 of 3 labels, softmax, from 0.5 to 0.7, by label"


def test_rules_are_shown_in_words(signing_key: SigningKey, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_null_bundle(tmp_path, signing_key)
    with open_bundle(path, trusted=None) as bundle:
        manifest = replace(bundle.manifest, classify=RULE)
    shown = list(meaning(manifest))
    assert [kind for kind, _ in shown] == ["input", "output", "after", "labels"]
    assert shown[2:] == [("after", RULE_TEXT), ("labels", "idle, worn, off; none: off")]
    assert main(["bundle", "inspect", str(path)]) == 0
    assert f"{shown[0][0]:<10}{shown[0][1]}" in capsys.readouterr().out
