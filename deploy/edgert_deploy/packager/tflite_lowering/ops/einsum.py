"""Einsum, two operands at a time: each pair is a matrix product over groups of axes, or an element-wise product.

Source: the specification of ONNX's Einsum. The axes of an ellipsis get labels of their own, counted from the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import Op

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Equation:
    """The labels of each operand and of the result."""

    operands: tuple[Labels, ...]
    result: Labels


def parse(text: str, ranks: list[int]) -> Equation:
    """Return `text` with labels for the axes of each ellipsis. Raises Uncovered where it does not fit `ranks`."""
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise Uncovered(
            f"the equation {text!r} has {len(terms)} operands, but the node has {len(ranks)}; correct the equation"
        )
    operands = tuple(_labels(term, rank) for term, rank in zip(terms, ranks, strict=True))
    for labels, rank in zip(operands, ranks, strict=True):
        if len(labels) != rank:
            raise Uncovered(f"the equation {text!r} does not fit a value of rank {rank}; correct the equation")
    flat = [label for labels in operands for label in labels]
    dots = sorted({label for label in flat if label.startswith(".")}, key=lambda label: -int(label[1:]))
    if arrow:
        before, ellipsis, after = right.partition("...")
        return Equation(operands, (*before, *(dots if ellipsis else ()), *after))
    return Equation(operands, (*dots, *sorted(label for label in flat if flat.count(label) == 1 and label[0] != ".")))


def _labels(term: str, rank: int) -> Labels:
    before, ellipsis, after = term.partition("...")
    count = rank - len(before) - len(after) if ellipsis else 0
    return (*before, *(f".{i}" for i in range(count - 1, -1, -1)), *after)


@dataclass(frozen=True)
class Term:
    """An intermediate operand whose axes have `labels`: a tensor, or a constant that is written when it is read."""

    lowering: Lowering
    name: str
    labels: Labels
    shape: BatchShape
    made: int | None = None
    constant: NDArray[Any] | None = None

    @property
    def tensor(self) -> int:
        if self.constant is not None:
            return self.lowering.constant(self.constant, self.name)
        assert self.made is not None
        return self.made

    def lengths(self) -> dict[str, int]:
        return dict(zip(self.labels, self.shape.dims, strict=True))

    def in_order(self, labels: Labels) -> Term:
        """Return the term with its axes in another order."""
        if labels == self.labels:
            return self
        order = tuple(self.labels.index(label) for label in labels)
        made = replace(self, labels=labels, shape=self.shape.permuted(order))
        if self.constant is not None:
            return replace(made, constant=self.constant.transpose(order))
        return replace(made, made=self.lowering.transpose(self.tensor, order, made.scratch("turned")))

    def grouped(self, *groups: Labels) -> Term:
        """Return the term with one axis per group; the groups hold all labels, and an empty one has length 1."""
        laid = self.in_order(tuple(label for group in groups for label in group))
        signature = dict(zip(self.labels, self.shape.signature, strict=True))
        dims = tuple(int(np.prod([self.lengths()[label] for label in group])) for group in groups)
        opens = [any(signature[label] == -1 for label in group) for group in groups]
        shape = BatchShape(dims, tuple(-1 if is_open else n for n, is_open in zip(dims, opens, strict=True)))
        return laid.reshaped(tuple("".join(group) for group in groups), shape)

    def reshaped(self, labels: Labels, shape: BatchShape) -> Term:
        made = replace(self, labels=labels, shape=shape)
        if shape == self.shape:
            return made
        if self.constant is not None:
            return replace(made, constant=self.constant.reshape(shape.dims))
        return replace(made, made=self.lowering.reshape(self.tensor, shape, made.scratch("grouped")))

    def scratch(self, what: str) -> int:
        return self.lowering.scratch(f"{self.name}_{what}", self.shape)

    def without(self, labels: set[str]) -> Term:
        """Return the term without those of `labels` whose axes have length 1 here."""
        pairs = enumerate(zip(self.labels, self.shape.signature, strict=True))
        kept = tuple(i for i, (label, length) in pairs if length != 1 or label not in labels)
        return self.reshaped(tuple(self.labels[i] for i in kept), self.shape.permuted(kept))

    def without_repeats(self) -> Term:
        """Return the diagonal over axes with one label: every (n + 1)th element of both axes joined."""
        for label in self.labels:
            if self.labels.count(label) == 1:
                continue
            first, second = (i for i, other in enumerate(self.labels) if other == label)
            length, rest = self.shape.dims[first], [i for i in range(self.shape.rank) if i not in (first, second)]
            marked = replace(self, labels=(*self.labels[:second], f"{label}'", *self.labels[second + 1 :]))
            others = tuple(marked.labels[i] for i in rest)
            both = marked.in_order((*others, label, f"{label}'"))
            whole = both.shape.without_axis(len(rest)).with_length(len(rest), length * length)
            flat = both.reshaped((*others, label), whole)
            return flat.taken(label, np.arange(length) * (length + 1)).without_repeats()
        return self

    def taken(self, label: str, elements: NDArray[Any]) -> Term:
        axis = self.labels.index(label)
        made = replace(self, shape=self.shape.with_length(axis, len(elements)))
        if self.constant is not None:
            return replace(made, constant=self.constant.take(elements, axis))
        return replace(made, made=self.lowering.pick(self.tensor, elements, axis, made.scratch("diagonal")))

    def summed(self, labels: Iterable[str]) -> Term:
        """Return the sum over `labels`."""
        axes = sorted(self.labels.index(label) for label in labels)
        if not axes:
            return self
        kept = tuple(i for i in range(self.shape.rank) if i not in axes)
        made = replace(self, labels=tuple(self.labels[i] for i in kept), shape=self.shape.permuted(kept))
        if self.constant is not None:
            return replace(made, constant=self.constant.sum(axis=tuple(axes)))
        output = made.scratch("summed")
        self.lowering.total(self.tensor, self.shape, axes, output, made.shape, keep=False)
        return replace(made, made=output)


def einsum(lowering: Lowering, node: Node) -> None:
    output = node.outputs[0]
    equation = parse(str(node.attributes["equation"]), [lowering.shape(name).rank for name in node.inputs])
    named = zip(node.inputs, equation.operands, strict=True)
    terms = [_term(lowering, name, labels, output).without_repeats() for name, labels in named]
    terms = _without_broadcasts(terms)
    held = terms.pop(0)
    while terms:
        needed = {label for term in terms[1:] for label in term.labels} | set(equation.result)
        held = _product(held, terms.pop(0), needed)
    held = held.summed(set(held.labels) - set(equation.result)).in_order(_present(equation.result, held))
    lowering.reshape(held.tensor, lowering.shape(output), lowering.define(output))


def _term(lowering: Lowering, name: str, labels: Labels, output: str) -> Term:
    dtype = lowering.dtype(name)
    if dtype != FLOAT32:
        raise Uncovered(f"{name!r} has dtype {dtype}; convert the model to float32")
    constant = lowering.value(name, f"{name!r}") if lowering.is_constant(name) else None
    made = None if lowering.is_constant(name) else lowering.native(name)
    return Term(lowering, f"{output}_{name}", labels, lowering.shape(name), made, constant)


def _without_broadcasts(terms: list[Term]) -> list[Term]:
    """Drop the axes of length 1 that are longer, or the batch, in other operands."""
    longer = {
        label for term in terms for label, length in zip(term.labels, term.shape.signature, strict=True) if length != 1
    }
    return [term.without(longer) for term in terms]


def _present(labels: Labels, term: Term) -> Labels:
    return tuple(label for label in labels if label in term.labels)


def _product(left: Term, right: Term, needed: set[str]) -> Term:
    """Return the product of two operands, without the labels that are not `needed` any more."""
    left = left.summed(set(left.labels) - needed - set(right.labels))
    right = right.summed(set(right.labels) - needed - set(left.labels))
    if left.constant is not None and right.constant is None:
        left, right = right, left  # the constant on the side that FULLY_CONNECTED has its weights on
    shared = tuple(label for label in left.labels if label in right.labels)
    batch, inner = (tuple(n for n in shared if (n in needed) is kept) for kept in (True, False))
    rows, columns = (tuple(n for n in t.labels if n not in shared) for t in (left, right))
    signature = {
        n: (d, s) for t in (right, left) for n, d, s in zip(t.labels, t.shape.dims, t.shape.signature, strict=True)
    }
    labels = (*batch, *rows, *columns)
    shape = BatchShape(tuple(signature[n][0] for n in labels), tuple(signature[n][1] for n in labels))
    if inner and not batch and right.constant is not None:
        made = _times_weights(left.grouped(rows, inner), right.grouped(columns, inner))
    else:
        multiply = _batched if inner else _outer
        made = multiply(left.grouped(batch, rows, inner), right.grouped(batch, inner, columns))
    return made.reshaped(labels, shape)


def _result(left: Term, right: Term, *axes: tuple[Term, int]) -> Term:
    """Return a term for a product, with the given axes of both."""
    pairs = [(term.shape.dims[i], term.shape.signature[i]) for term, i in axes]
    shape = BatchShape(tuple(n for n, _ in pairs), tuple(n for _, n in pairs))
    labels = tuple(term.labels[i] for term, i in axes)
    return replace(left, labels=labels, shape=shape, constant=None, name=f"{left.name}_product")


def _outer(left: Term, right: Term) -> Term:
    """[batch, rows, 1] * [batch, 1, columns]."""
    made = _result(left, right, (left, 0), (left, 1), (right, 2))
    tensor = left.lowering.arithmetic("MUL", [left.tensor, right.tensor], made.scratch("outer"))
    return replace(made, made=tensor)


def _batched(left: Term, right: Term) -> Term:
    """[batch, rows, inner] * [batch, inner, columns]."""
    made = _result(left, right, (left, 0), (left, 1), (right, 2))
    output = made.scratch("matrices")
    left.lowering.emit("BATCH_MATMUL", [left.tensor, right.tensor], [output], adjX=False, adjY=False)
    return replace(made, made=output)


def _times_weights(left: Term, right: Term) -> Term:
    """[rows, inner] * [columns, inner]'."""
    made = _result(left, right, (left, 0), (right, 0))
    bias = left.lowering.constant(np.zeros(right.shape.dims[0]), f"{made.name}_bias")
    output = made.scratch("weighted")
    left.lowering.emit("FULLY_CONNECTED", [left.tensor, right.tensor, bias], [output])
    return replace(made, made=output)


OPS = {"Einsum": Op(einsum)}
