"""Word and character error rates equal jiwer's rates."""

from __future__ import annotations

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import OtherMetric
from edgert_deploy.packager.accuracy.text_metrics import edits
from tests.support.models.metrics import reference_to, result_of

LETTERS = "ab c"
RULE = Ctc("steps", ("", *LETTERS))
SPECS = (TensorSpec("steps", "FP32", (-1, 24, 5)),)
TEXTS = st.text(LETTERS, min_size=1, max_size=12).filter(lambda text: text.strip() != "")


def steps_of(texts: list[str]) -> NDArray[np.float32]:
    """Return scores [N, 24, classes] that CTC decodes to `texts`. A blank follows each letter."""
    path = np.zeros((len(texts), 24), int)
    for row, text in zip(path, texts, strict=True):
        row[: 2 * len(text) : 2] = [1 + LETTERS.index(letter) for letter in text]
    scores: NDArray[np.float32] = 9 * np.eye(5, dtype=np.float32)[path]
    return scores


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_the_rates_equal_jiwers_rates(pairs: list[tuple[str, str]]) -> None:
    truth, found = ([pair[i] for pair in pairs] for i in (0, 1))
    answers = [steps_of(found)]
    reference = reference_to(SPECS, answers, ctc=RULE, transcripts=np.array(truth))
    rows = reference.all_rows
    assert metric_for("wer", reference).score(answers, rows) == pytest.approx(1 - jiwer.wer(truth, found))
    assert metric_for("cer", reference).score(answers, rows) == pytest.approx(1 - jiwer.cer(truth, found))


def test_the_edits_of_known_sequences_are_counted() -> None:
    assert edits("kitten", "sitting") == 3
    assert edits("", "abc") == edits("abc", "") == 3
    assert edits("", "") == 0
    assert edits(["a", "b"], ["b"]) == 1


def test_the_transcripts_determine_the_metric_and_the_other_rate_is_shown() -> None:
    reference = reference_to(SPECS, [steps_of(["ab c", "b"])], ctc=RULE, transcripts=np.array(["ab c", "b"]))
    result = result_of(reference, [steps_of(["ab a", "b"])])
    assert (result.accuracy.metric, result.accuracy.fp32, result.accuracy.artifact) == ("1-cer", 1.0, 0.8)
    assert result.other_metrics[0] == OtherMetric("1-wer", 1.0, 1 - 1 / 3)
    assert result_of(reference, [steps_of(["", ""])], metric="wer").accuracy.artifact == 0.0
    assert metric_for("auto", reference_to(SPECS, reference.answers, ctc=RULE)).name == "texts"


def test_other_outputs_are_judged_in_addition_to_the_texts() -> None:
    truth = ["ab c", "b", "c", "a"] * 3
    steps, place = steps_of(truth), np.arange(24, dtype=np.float32).reshape(12, 2)
    specs = (*SPECS, TensorSpec("place", "FP32", (-1, 2)))
    reference = reference_to(specs, [steps, place], ctc=RULE, transcripts=np.array(truth))
    assert result_of(reference, [steps, place]).passed
    broken = result_of(reference, [steps, place[::-1]])
    assert not broken.passed
    assert "values of place fell by" in broken.loss_text()
    assert "give --metric cer" in broken.loss_text()
    assert result_of(reference, [steps, place[::-1]], metric="cer").passed


def test_an_error_rate_needs_transcripts_and_the_rule_for_texts() -> None:
    answers = [steps_of(["a"])]
    with pytest.raises(CalibrationInvalid, match=r"labels.csv beside the hold-out"):
        metric_for("wer", reference_to(SPECS, answers, ctc=RULE))
    with pytest.raises(ConfigInvalid, match=r"--postprocess with a table \[ctc\]"):
        metric_for("cer", reference_to(SPECS, answers, transcripts=np.array(["a"])))
