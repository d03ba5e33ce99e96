"""Einsum: multiplies two operands at a time, as matrices over groups of axes or element by element.

Source: the specification of ONNX's Einsum. The axes of an ellipsis get separate labels, counted from the last axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, Unsupported, Value

Labels = tuple[str, ...]


def parse(text: str, ranks: list[int]) -> tuple[tuple[Labels, ...], Labels]:
    """Return the labels of each operand and of the result. Raises Unsupported if they do not fit `ranks`."""
    operands_text, arrow, result_text = text.replace(" ", "").partition("->")
    terms = operands_text.split(",")
    if len(terms) != len(ranks):
        raise Unsupported(
            f"the equation {text!r} has {len(terms)} operands, but the node has {len(ranks)}; correct the equation"
        )
    operands = tuple(_labels(term, rank) for term, rank in zip(terms, ranks, strict=True))
    for labels, rank in zip(operands, ranks, strict=True):
        if len(labels) != rank:
            raise Unsupported(f"the equation {text!r} does not fit a value of rank {rank}; correct the equation")
        if len(set(labels)) != rank:
            raise Unsupported(
                f"the equation {text!r} takes a diagonal; take the diagonal with GatherElements before the Einsum"
            )
    flat = [label for labels in operands for label in labels]
    ellipsis_labels = sorted({label for label in flat if label.startswith(".")}, key=lambda label: -int(label[1:]))
    if arrow:
        before, ellipsis, after = result_text.partition("...")
        return operands, (*before, *(ellipsis_labels if ellipsis else ()), *after)
    once = sorted(label for label in flat if flat.count(label) == 1 and label[0] != ".")
    return operands, (*ellipsis_labels, *once)


def _labels(term: str, rank: int) -> Labels:
    before, ellipsis, after = term.partition("...")
    count = rank - len(before) - len(after) if ellipsis else 0
    return (*before, *(f".{i}" for i in range(count - 1, -1, -1)), *after)


@dataclass(frozen=True)
class Term:
    """An intermediate operand with axes `labels`: a value, or a constant that is not written yet."""

    labels: Labels
    shape: BatchShape
    value: Value | NDArray[Any]

    def lengths(self) -> dict[str, int]:
        return dict(zip(self.labels, self.shape.dims, strict=True))

    def signature(self) -> dict[str, int]:
        return dict(zip(self.labels, self.shape.signature, strict=True))

    def in_order(self, labels: Labels) -> Term:
        """Return the term with its axes in the order of `labels`."""
        order, value = tuple(self.labels.index(label) for label in labels), self.value
        turned = value.transpose(order) if isinstance(value, np.ndarray) else value.transposed(order)
        return Term(labels, self.shape.permuted(order), turned)

    def grouped(self, *groups: Labels) -> Term:
        """Return the term with one axis per group of labels. The axis of an empty group has length 1."""
        ordered = self.in_order(tuple(label for group in groups for label in group))
        signature, lengths = self.signature(), self.lengths()
        dims = tuple(int(np.prod([lengths[label] for label in group])) for group in groups)
        opens = [any(signature[label] == -1 for label in group) for group in groups]
        shape = BatchShape(dims, tuple(-1 if is_open else length for length, is_open in zip(dims, opens, strict=True)))
        return ordered.reshaped(tuple("".join(group) for group in groups), shape)

    def reshaped(self, labels: Labels, shape: BatchShape) -> Term:
        value = self.value
        return Term(
            labels, shape, value.reshape(shape.dims) if isinstance(value, np.ndarray) else value.reshaped(shape)
        )

    def without(self, labels: set[str]) -> Term:
        """Return the term without the axes of `labels` that have length 1 in this term."""
        lengths = enumerate(self.signature().items())
        kept = tuple(axis for axis, (label, length) in lengths if length != 1 or label not in labels)
        return self.reshaped(tuple(self.labels[axis] for axis in kept), self.shape.permuted(kept))

    def summed(self, labels: Iterable[str]) -> Term:
        axes, value = sorted(self.labels.index(label) for label in labels), self.value
        if not axes:
            return self
        total = value.sum(axis=tuple(axes)) if isinstance(value, np.ndarray) else value.total(axes, keep=False)
        kept = tuple(label for axis, label in enumerate(self.labels) if axis not in axes)
        return Term(kept, self.shape.reduced(axes, keep=False), total)


def einsum(lowering: Lowering, node: Node) -> None:
    shape = lowering.shape(node.outputs[0])
    operands, result = parse(str(node.attributes["equation"]), [lowering.shape(name).rank for name in node.inputs])
    terms = [_term(lowering, node, index, labels) for index, labels in enumerate(operands)]
    # Constants come last: the left operand of each product is then a computed value, and weights are the right operand,
    # as FULLY_CONNECTED needs.
    terms = sorted(_without_broadcasts(terms), key=lambda term: isinstance(term.value, np.ndarray))
    product = terms.pop(0)
    while terms:
        needed = {label for term in terms[1:] for label in term.labels} | set(result)
        product = _product(product, terms.pop(0), needed)
    product = product.summed(set(product.labels) - set(result))
    product = product.in_order(tuple(label for label in result if label in product.labels))
    lowering.result(node, _computed(product).reshaped(shape))


def _term(lowering: Lowering, node: Node, index: int, labels: Labels) -> Term:
    name = node.inputs[index]
    dtype = lowering.dtype(name)
    if dtype != FLOAT32:
        raise Unsupported(f"{name!r} has dtype {dtype}; convert the model to float32")
    is_constant = lowering.is_constant(name)
    return Term(
        labels, lowering.shape(name), lowering.value(name, f"{name!r}") if is_constant else lowering.read(node, index)
    )


def _without_broadcasts(terms: list[Term]) -> list[Term]:
    """Drop each axis of length 1 whose label has a larger length, or is the batch, in another operand."""
    longer = {label for term in terms for label, length in term.signature().items() if length != 1}
    return [term.without(longer) for term in terms]


def _product(left: Term, right: Term, needed: set[str]) -> Term:
    """Return the product of two operands, without the labels that are no longer `needed`."""
    left = left.summed(set(left.labels) - needed - set(right.labels))
    right = right.summed(set(right.labels) - needed - set(left.labels))
    shared = tuple(label for label in left.labels if label in right.labels)
    batch = tuple(label for label in shared if label in needed)
    inner = tuple(label for label in shared if label not in needed)
    rows, columns = (tuple(label for label in term.labels if label not in shared) for term in (left, right))
    dims = right.lengths() | left.lengths()
    signature = right.signature() | left.signature()
    labels = (*batch, *rows, *columns)
    shape = BatchShape(tuple(dims[label] for label in labels), tuple(signature[label] for label in labels))
    if inner and not batch and isinstance(right.value, np.ndarray):
        weights = np.asarray(right.grouped(columns, inner).value)
        product = _computed(left.grouped(rows, inner)).times_weights(weights)
    else:
        rows_matrix, columns_matrix = left.grouped(batch, rows, inner), right.grouped(batch, inner, columns)
        product_shape = BatchShape(
            (*rows_matrix.shape.dims[:2], columns_matrix.shape.dims[2]),
            (*rows_matrix.shape.signature[:2], columns_matrix.shape.signature[2]),
        )
        product = _computed(rows_matrix).op(
            "BATCH_MATMUL" if inner else "MUL", columns_matrix.value, shape=product_shape
        )
    return Term(labels, shape, product.reshaped(shape))


def _computed(term: Term) -> Value:
    assert isinstance(term.value, Value)
    return term.value


OPS = {"Einsum": Op(einsum)}
