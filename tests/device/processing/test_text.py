"""Token ids, masks and type ids are the same as in the library tokenizers; other bytes are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

import tokenizers

from edgert.bundle.text_rules import Text
from edgert.errors import BundleError, RequestError
from edgert.processing.text import TextPreprocessor, texts_of
from edgert.tensors import TensorSpec, byte_rows
from tests.support.models.intents import sentences, tokenizer_json

RULE = Text("tokenizer.json", "ids", 32, "mask", "types")
KINDS = ("wordpiece", "byte-level bpe", "unigram")
ODD = (
    "", " ", "a", "switch on the lamp", "😀👩‍👩‍👧🏽", "e\u0301 é ﬁ Ǆ", "東京の天気は", "שלום עולם مرحبا", "a\0b", "tab\tnew\nline\r\n",
    "\u200b\u200d\ufeff", "x" * 300, "play " * 200, "[CLS] [SEP] [PAD]", "##ing ##", "\U0010ffff\uffff", "ｆｕｌｌ ½ ①",
    "i̇stanbul ſ ẞ", "1,000.50€", "http://a.b/c?d=e&f#g",
)  # fmt: skip


@cache
def content(kind: str) -> str:
    if kind == "wordpiece":
        return tokenizer_json()
    special = ["<pad>", "<unk>"]
    if kind == "unigram":
        made = tokenizers.Tokenizer(tokenizers.models.Unigram())
        made.normalizer = tokenizers.normalizers.NFKC()
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        trainer: Any = tokenizers.trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
    made.train_from_iterator([text for text, _ in sentences(200, 1)], trainer)
    return str(made.to_str())


def preprocessor(kind: str = "wordpiece", length: int = -1, datatype: str = "INT64", **change: Any) -> TextPreprocessor:
    rule = replace(RULE, **change)
    inputs = [TensorSpec(name, datatype, (-1, length)) for name in rule.inputs]
    return TextPreprocessor(rule, inputs, content(kind).encode())


def library(kind: str, text: str, most: int = 32, direction: str = "right") -> Any:
    tokenizer = tokenizers.Tokenizer.from_str(content(kind))
    tokenizer.enable_truncation(most, direction=direction)
    return tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_become_the_same_tokens_as_in_the_library(kind: str) -> None:
    device = preprocessor(kind)
    for text in ODD:
        want = library(kind, text)
        if not want.ids:  # this tokenizer adds no special tokens
            with pytest.raises(
                RequestError, match="has 0 tokens; the model takes 1 to 32: send a text that is not empty"
            ):
                device(byte_rows([text.encode()]))
            continue
        made = device(byte_rows([text.encode()]))
        assert made["ids"].tolist() == [want.ids], text
        assert made["mask"].tolist() == [want.attention_mask]
        assert made["types"].tolist() == [want.type_ids]


@given(st.text(max_size=200).filter(lambda text: not text.endswith("\0")), st.sampled_from(("right", "left")))
def test_any_text_becomes_the_same_tokens_as_in_the_library(text: str, direction: str) -> None:
    made = preprocessor(max_tokens=12, truncation=direction)(byte_rows([text.encode()]))
    assert made["ids"].tolist() == [library("wordpiece", text, 12, direction).ids]


def test_texts_are_padded_to_the_longest_or_to_the_models_length() -> None:
    texts = byte_rows([b"play", b"wake me in ten minutes", b""])
    device = preprocessor(pad_id=7)
    made = device(texts)
    longest = made["ids"].shape[1]
    assert longest == len(library("wordpiece", "wake me in ten minutes").ids)
    assert made["ids"][2].tolist() == [2, 3, *[7] * (longest - 2)]
    assert made["mask"].sum(axis=1).tolist() == [3, longest, 2]
    fixed = preprocessor(length=40, datatype="INT32", pad_id=7)(texts)
    assert {name: (array.shape, array.dtype.name) for name, array in fixed.items()} == dict.fromkeys(
        RULE.inputs, ((3, 40), "int32")
    )
    np.testing.assert_array_equal(fixed["ids"][:, :longest], made["ids"])
    alone = preprocessor(mask="")(texts)
    assert sorted(alone) == ["ids", "types"]
    np.testing.assert_array_equal(alone["types"], made["types"])


def test_without_truncation_a_longer_text_is_refused() -> None:
    device = preprocessor(max_tokens=4, truncation="none")
    assert device(byte_rows([b"play"]))["ids"].shape == (1, 3)
    with pytest.raises(RequestError, match="text 1 of the request has 6 tokens; the model takes 1 to 4: shorten it"):
        device(byte_rows([b"play", b"wake me in ten"]))


def test_without_special_tokens_a_text_has_only_its_own_tokens() -> None:
    assert preprocessor(special_tokens=False)(byte_rows([b"play"]))["ids"].shape == (1, 1)


def test_zeros_at_the_end_of_a_text_are_padding_and_zeros_within_a_text_are_kept() -> None:
    assert texts_of(byte_rows([b"a\0b", b"abcdef", b""])) == ["a\0b", "abcdef", ""]


def test_bytes_that_are_not_utf8_are_refused_with_their_position() -> None:
    for bad, why in ((b"ok \xc3", "unexpected end of data at byte 3"), (b"\xed\xa0\x80", "invalid continuation byte")):
        with pytest.raises(RequestError, match=f"text 1 of the request is not UTF-8: {why}"):
            texts_of(byte_rows([b"good", bad]))


def test_each_text_has_a_limit_and_all_texts_together_have_a_limit() -> None:
    with pytest.raises(RequestError, match="text 0 of the request has 300000 bytes; at most 262144"):
        texts_of(byte_rows([b"x" * 300_000]))
    with pytest.raises(RequestError, match="the texts have 5000000 bytes; at most 4194304 are allowed"):
        texts_of(byte_rows([b"x" * 100_000] * 50))


@pytest.mark.parametrize("broken", ["", "{}", "[]", "null", '{"model": {"type": "BPE"}}', "\0", '{"version":"9"}'])
def test_a_file_that_is_not_a_tokenizer_is_refused(broken: str) -> None:
    with pytest.raises(BundleError, match=r"the library tokenizers [\d.]+ cannot use the tokenizer"):
        TextPreprocessor(RULE, [TensorSpec(name, "INT64", (-1, -1)) for name in RULE.inputs], broken.encode())


def test_special_tokens_that_leave_no_room_for_the_text_are_refused() -> None:
    with pytest.raises(BundleError, match="max_tokens = 2, and the tokenizer adds 2 special tokens"):
        preprocessor(max_tokens=2)
