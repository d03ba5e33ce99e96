"""Padding: an engine gets inputs of any length in its buckets' sizes, and answers get their length back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets, CutOutput, PaddedInput
from edgert.engines import Session
from edgert.engines.padding import PaddedSession, Padder
from edgert.errors import RequestError
from edgert.tensors import TensorSpec

IDS, MASK = TensorSpec("ids", "INT64", (-1, -1)), TensorSpec("mask", "FP32", (-1, -1, -1))
OUTPUTS = (TensorSpec("scores", "FP32", (-1, 4)), TensorSpec("halves", "INT64", (-1, -1)))
# The length is in two axes of the mask, like in attention masks.
BUCKETS = Buckets(
    "tokens",
    (4, 8),
    (PaddedInput("ids", 1, 7.0), PaddedInput("mask", 1), PaddedInput("mask", 2, -1.0)),
    (CutOutput("halves", 1, 2),),
)


class Engine(Session):
    """A session that notes the shapes of its inputs, and returns every second id."""

    def __init__(self) -> None:
        self.inputs: tuple[TensorSpec, ...] = (IDS, MASK)
        self.outputs: tuple[TensorSpec, ...] = OUTPUTS
        self.got: list[list[NDArray[Any]]] = []

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.got.append(list(tensors))
        return [np.zeros((len(tensors[0]), 4), np.float32), np.ascontiguousarray(tensors[0][:, ::2])]

    def close(self) -> None:
        self.got.clear()


def request(length: int, items: int = 2) -> list[NDArray[Any]]:
    return [np.arange(items * length).reshape(items, length), np.ones((items, length, length), np.float32)]


@pytest.mark.parametrize(("length", "size"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_an_engine_gets_only_lengths_of_buckets_and_its_answers_have_the_length_of_the_request(
    length: int, size: int
) -> None:
    engine = Engine()
    sent = request(length)
    scores, halves = PaddedSession(engine, BUCKETS).run(sent)
    ids, mask = engine.got[0]
    assert (ids.shape, mask.shape) == ((2, size), (2, size, size))
    np.testing.assert_array_equal(ids[:, :length], sent[0])
    assert (ids[:, length:] == 7).all()
    assert (mask[:, length:, :length] == 0).all()
    assert (mask[:, :, length:] == -1).all()
    assert scores.shape == (2, 4)
    np.testing.assert_array_equal(halves, sent[0][:, ::2])
    assert halves.flags.c_contiguous
    assert ids.dtype == np.int64


def test_a_length_that_is_a_bucket_is_not_copied() -> None:
    engine, sent = Engine(), request(8)
    PaddedSession(engine, BUCKETS).run(sent)
    assert engine.got[0][0] is sent[0]


@pytest.mark.parametrize("length", [0, 9])
def test_a_length_without_a_bucket_is_refused_before_the_engine_runs(length: int) -> None:
    engine = Engine()
    with pytest.raises(RequestError, match="1 to 8"):
        PaddedSession(engine, BUCKETS).run(request(length))
    assert engine.got == []


def test_inputs_that_differ_in_length_are_refused() -> None:
    with pytest.raises(RequestError, match="differ in length along axis 'tokens'"):
        Padder(BUCKETS, (IDS, MASK), OUTPUTS).padded([request(3)[0], request(4)[1]])


def test_stored_samples_are_trimmed_to_their_own_length() -> None:
    padder = Padder(BUCKETS, (IDS, MASK), OUTPUTS)
    ids, mask = padder.trimmed(padder.padded(request(5)), 5)
    np.testing.assert_array_equal(ids, request(5)[0])
    assert mask.shape == (2, 5, 5)
