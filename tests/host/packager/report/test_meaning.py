"""The meaning of a bundle's inputs and outputs: the terminal and the page show the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import Manifest
from edgert.bundle.rules import Classify
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.signing import SigningKey
from edgert.bundle.text_rules import Embed, Text
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


@pytest.mark.parametrize(
    ("rule", "kind", "text"),
    [
        (
            {"sound": Sound("x", 16000, 16000, step=8000)},
            "before",
            "x: WAV files, windows of 16000 samples at 16000 Hz, every 8000: log_mel, 40 mel bands, n_fft 512, hop 160",
        ),
        (
            {"series": Series("x", 3, 128, features=("statistics", "bands"), rate_hz=100.0, bands=((0.0, 10.0),))},
            "before",
            "x: windows of 128 x 3 channels: statistics, bands",
        ),
        (
            {"text": Text("tokenizer.json", "ids", 16, "mask")},
            "before",
            "text, at most 16 tokens, cut on the right; becomes ids, mask, padded with 0",
        ),
        ({"embed": Embed("states", "cls")}, "after", "states: embedding, the first token's, of length 1"),
    ],
)
def test_a_rule_for_signals_or_text_is_shown_in_one_line(
    signing_key: SigningKey, tmp_path: Path, rule: dict[str, Any], kind: str, text: str
) -> None:
    with open_bundle(make_null_bundle(tmp_path, signing_key), trusted=None) as bundle:
        fields = vars(bundle.manifest)
    manifest = SimpleNamespace(**fields | rule)  # without the checks against the model's tensors
    assert (kind, text) in list(meaning(cast(Manifest, manifest)))
