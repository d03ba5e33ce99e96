"""A model's tensors for apps: the allowed content and the size of requests and answers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numpy.typing import NDArray

from edgert.bundle.manifest import Manifest
from edgert.engines.padding import Padder
from edgert.errors import RequestError
from edgert.printable import counted
from edgert.processing.postprocess import Postprocessor
from edgert.processing.preprocessors import InputPreprocessor
from edgert.processing.text import TextPreprocessor
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire
from edgert.tensors import TensorSpec, batchable, fits
from edgert.worker.pipeline.cache import tag_of
from edgert.worker.pipeline.session_memory import MemoryForm

ITEMS_MAX = 1024
SHARED_ITEMS = 8
FRAME_BYTES_MIN = 64 * 1024
SHARED_BYTES_MIN = 256 * 1024
SHARED_BYTES_MIN_IMAGES = 8 * 1024**2  # a 1080p frame

Arrays = list[NDArray[Any]]


class ModelInputs(NamedTuple):
    """The tensors of a request as arrays; valid while its tensors stay at the same place in memory.

    Attributes:
        items: The number of items in each array.
        raw: Whether the arrays contain an image, a signal or a text for preprocessing.
        tag: Bytes that identify dtypes and shapes.
    """

    arrays: Arrays
    items: int
    raw: bool
    tag: bytes


class AppTensors:
    """Inputs and outputs of a model for apps.

    Attributes:
        rule_input: The index of the input that `pre` processes.
        sent_inputs: The indices of the inputs in a request with raw input. One text becomes several inputs of the
            model.
        sent_outputs: The indices of the outputs to send, among all outputs of model and rules. The first list is for
            model tensors, the second list for raw inputs.
        numbers: The outputs of `sent_outputs`, as indices in `outputs`.
    """

    def __init__(
        self,
        manifest: Manifest,
        pre: InputPreprocessor | None,
        post: Postprocessor | None,
        form: MemoryForm,
        padder: Padder | None,
    ) -> None:
        self._pre = pre
        self._form = form
        self._padder = padder
        self._batchable = batchable(manifest.inputs)
        self.inputs = manifest.app_inputs
        names, rule = [spec.name for spec in self.inputs], manifest.input_rule
        self.rule_input = 0 if rule is None else names.index(rule.input)
        self.sent_inputs = [i for i, name in enumerate(names) if name in manifest.sent_inputs]
        computed = manifest.outputs if post is None else post.outputs
        self._labels = () if post is None else post.labels
        states = {binding.output for binding in manifest.state}
        places = [i for i, spec in enumerate(computed) if spec.name not in states]
        self.outputs = tuple(self._answer_spec(computed[i]) for i in places)
        sent = [places if post is None else post.sent(raw) for raw in (False, True)]
        self.sent_outputs = tuple([i for i in places if i in each] for each in sent)
        self.numbers = tuple([places.index(i) for i in each] for each in self.sent_outputs)
        self._item_bytes_max = max(sum(map(self._item_bytes, specs)) for specs in (self.inputs, self.outputs))

    def frame_bytes_max(self, configured_bytes: int) -> int:
        """Return the largest frame that this model needs, at most `configured_bytes`."""
        specs = (*self.inputs, *self.outputs)
        open_ended = self._padder is None and any(n == -1 for spec in specs for n in spec.item_shape)
        if open_ended or self._pre is not None:  # an image may be larger than the model's input
            return configured_bytes
        return min(configured_bytes, FRAME_BYTES_MIN + ITEMS_MAX * self._item_bytes_max + self._form.size_bytes)

    @property
    def shared_bytes(self) -> int:
        """The size of each half of a client's shared memory: eight items of a request or of an answer fit."""
        images = self._pre is not None and self._pre.of_images
        return max(SHARED_BYTES_MIN_IMAGES if images else SHARED_BYTES_MIN, SHARED_ITEMS * self._item_bytes_max)

    def welcome(self) -> dict[str, Any]:
        """Return the description of the model for a client that connects."""
        description: dict[str, Any] = {
            "inputs": [spec.as_json() for spec in self.inputs],
            "outputs": [spec.as_json() for spec in self.outputs],
        }
        if self._pre is not None:
            forms = {"input": self._pre.frames, "integers": self._pre.integers, "files": self._pre.files}
            if isinstance(self._pre, TextPreprocessor):
                forms = {"text": self._pre.files}
            description["preprocess"] = {name: form.as_json() for name, form in forms.items() if form is not None}
            if self._form.pre is not None:
                description["preprocess"]["step"] = self._form.pre.step
            if len(self.sent_inputs) < len(self.inputs):
                computed = [
                    spec.name for i, spec in enumerate(self.inputs) if i not in self.sent_inputs or i == self.rule_input
                ]
                description["preprocess"]["text_for"] = computed
        if self._labels and sum(map(len, self._labels)) < wire.META_BYTES_MAX // 8:
            description["labels"] = list(self._labels)
        return description

    def read(self, tensors: tuple[wire.WireTensor, ...]) -> ModelInputs:
        """Return a frame's tensors as arrays, without a copy. Raises RequestError if the model rejects them."""
        numbers = self.sent_inputs if len(tensors) == len(self.sent_inputs) else range(len(self.inputs))
        if len(tensors) != len(numbers):
            raise RequestError(f"the model takes {counted(len(self.inputs), 'input')}, the request has {len(tensors)}")
        arrays, raw = [], False
        for tensor, i in zip(tensors, numbers, strict=True):
            spec, forms = self.inputs[i], self._forms(i, len(numbers))
            if tensor.number != i:
                raise RequestError(
                    f"the tensor at the place of input {i} ({spec.name!r}) has number {tensor.number}: send the inputs in order"
                )
            if not any(fits(form, tensor.datatype, tensor.shape) for form in forms):
                accepted = " or ".join(f"{form.datatype} {list(form.shape)}" for form in forms)
                raise RequestError(
                    f"input {i} ({spec.name!r}) takes {accepted}, got {tensor.datatype} {list(tensor.shape)}"
                )
            arrays.append(from_wire(tensor))
            if self._pre is not None and i == self.rule_input:
                raw = self._pre.wants(arrays[-1])
        return ModelInputs(arrays, self.items(arrays), raw, tag_of(arrays))

    def items(self, arrays: Arrays) -> int:
        """Return the number of items in a request. Raises RequestError."""
        if not (self._batchable or self._form.in_turn):
            return 1
        counts = {len(array) for array in arrays}
        if len(counts) != 1:
            raise RequestError(f"the inputs have batches of {sorted(counts)} items; give all the same number")
        if not 1 <= (count := counts.pop()) <= ITEMS_MAX:
            advice = "split it" if count else "send one or more"
            raise RequestError(f"the request has {count} items; it may have 1 to {ITEMS_MAX}: {advice}")
        return count

    def _forms(self, number: int, count: int) -> tuple[TensorSpec, ...]:
        """Return the allowed forms of input `number` in a request of `count` tensors."""
        if self._pre is None or number != self.rule_input:
            return (self.inputs[number],)
        if len(self.sent_inputs) == len(self.inputs):
            return self._pre.forms
        return self._pre.forms[1:] if count == len(self.sent_inputs) else self._pre.forms[:1]

    def _answer_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return an output's form in answers. A model whose items run in turn returns several items, too."""
        return TensorSpec(spec.name, spec.datatype, (-1, *spec.item_shape)) if self._form.in_turn else spec

    def _item_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of one item, its descriptor and its padding; an axis of any length counts as one."""
        if self._padder is not None:
            spec = self._padder.buckets.spec_at(spec, self._padder.buckets.largest)
        return math.prod(max(1, n) for n in spec.item_shape) * spec.dtype.itemsize + 2 * wire.ALIGNMENT
