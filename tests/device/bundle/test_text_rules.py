"""Rules for text are checked against the model's inputs and outputs when they enter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.buckets import Buckets, PaddedInput
from edgert.bundle.text_rules import Embed, Text, check_embed, check_text
from edgert.errors import BundleError
from edgert.tensors import TensorSpec

TEXT = Text("tokenizer.json", "ids", 16, "mask")
STATES = TensorSpec("states", "FP32", (-1, 16, 8))


def inputs(length: int, datatype: str = "INT64") -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, datatype, (-1, length)) for name in ("ids", "mask"))


def buckets(*names: str, pad: float = 0) -> Buckets:
    return Buckets("tokens", (8, 16), tuple(PaddedInput(name, 1, pad if name == "ids" else 0) for name in names))


def test_a_rule_for_text_may_have_inputs_of_a_fixed_or_of_an_open_length() -> None:
    check_text(TEXT, inputs(16), None)
    check_text(TEXT, inputs(32, "INT32"), None)
    check_text(TEXT, inputs(-1), buckets("ids", "mask"))
    check_text(replace(TEXT, pad_id=1), inputs(-1), buckets("ids", "mask", pad=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "x"}, "names input 'x'"),
        ({"types": "mask"}, "names an input twice"),
        ({"truncation": "middle"}, "known: right, left, none"),
        ({"max_tokens": 17}, "max_tokens = 17; the model allows 1 to 16"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"pad_id": -1}, "pad_id = -1"),
    ],
)
def test_a_rule_that_cannot_be_applied_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        check_text(replace(TEXT, **change), inputs(16), None)


def test_inputs_that_hold_no_tokens_are_refused() -> None:
    with pytest.raises(BundleError, match=r"gives INT64 or INT32 \[N, tokens\]; input 'ids' is FP32"):
        check_text(TEXT, inputs(16, "FP32"), None)
    with pytest.raises(BundleError, match="inputs of one shape"):
        check_text(TEXT, (inputs(16)[0], inputs(8)[1]), None)


def test_an_open_length_needs_buckets_for_the_same_inputs_with_the_same_pads() -> None:
    with pytest.raises(BundleError, match="build with --buckets"):
        check_text(TEXT, inputs(-1), None)
    with pytest.raises(BundleError, match="name exactly the inputs with this axis"):
        check_text(TEXT, inputs(-1), buckets("ids", "mask", "other"))
    with pytest.raises(BundleError, match="give --pad ids=1"):
        check_text(replace(TEXT, pad_id=1), inputs(-1), buckets("ids", "mask"))
    with pytest.raises(BundleError, match="allows 1 to 16"):
        check_text(replace(TEXT, max_tokens=17), inputs(-1), buckets("ids", "mask"))


def test_an_embedding_may_come_from_states_or_from_vectors() -> None:
    check_embed(Embed("states", mask="mask"), inputs(16), (STATES,))
    check_embed(Embed("states", "cls"), inputs(16), (STATES,))
    check_embed(Embed("y", "none"), inputs(16), (TensorSpec("y", "FP32", (-1, 8)),))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Embed("x"), "names output 'x'"),
        (Embed("states", "max"), "known: mean, cls, none"),
        (Embed("states", "none"), r"needs floats \[N, D\]; output 'states' is FP32 \[N, 16, 8\]"),
        (Embed("states"), "give mask = the input's name"),
        (Embed("states", mask="short"), "give mask = the input's name"),
    ],
)
def test_an_embedding_that_cannot_be_made_is_refused(rule: Embed, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        check_embed(rule, (*inputs(16), TensorSpec("short", "INT64", (-1, 8))), (STATES,))
