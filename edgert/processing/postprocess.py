"""Computes answers from a model's outputs, by the manifest's rules: best classes, texts, boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import Manifest
from edgert.bundle.rules import height_and_width
from edgert.processing.answers.classify import Classifier
from edgert.processing.answers.ctc import CtcReader
from edgert.processing.answers.detect import detections
from edgert.processing.answers.embedding import embeddings
from edgert.processing.images.placement import Placement
from edgert.tensors import TensorSpec

Arrays = list[NDArray[Any]]


class Postprocessor:
    """Adds the results of the manifest's rules to a model's outputs; `outputs` describes both."""

    def __init__(self, manifest: Manifest) -> None:
        self._classify, self._detect, self._ctc = manifest.classify, manifest.detect, manifest.ctc
        names = [spec.name for spec in manifest.outputs]
        self.outputs: tuple[TensorSpec, ...] = manifest.outputs
        if self._classify is not None:
            self._classify_index = names.index(self._classify.output)
            self._classifier = Classifier(self._classify)
            count = manifest.outputs[self._classify_index].shape[-1]
            width = count if count == -1 else min(self._classify.top_k, count)
            classes, scores = self._classify.added
            self.outputs += (TensorSpec(classes, "INT64", (-1, width)), TensorSpec(scores, "FP32", (-1, width)))
        if self._detect is not None:
            self._detect_indices = [names.index(name) for name in self._detect.outputs]
            most = self._detect.detections_max
            shapes = ((-1, most, 4), (-1, most), (-1, most), (-1,))
            datatypes = ("FP32", "FP32", "INT64", "INT64")
            self.outputs += tuple(map(TensorSpec, self._detect.added, datatypes, shapes))
        if self._ctc is not None:
            self._ctc_index = names.index(self._ctc.output)
            self._reader = CtcReader(self._ctc)
            text, probability = self._ctc.added
            self.outputs += (TensorSpec(text, "UINT8", (-1, -1)), TensorSpec(probability, "FP32", (-1,)))
        self._embed = manifest.embed
        self._mask_index = 0
        if self._embed is not None:
            self._embed_index = names.index(self._embed.output)
            if self._embed.pooling == "mean":
                self._mask_index = [spec.name for spec in manifest.app_inputs].index(self._embed.mask)
            size = manifest.outputs[self._embed_index].shape[-1]
            self.outputs += (TensorSpec(self._embed.name, "FP32", (-1, size)),)
        self._images = manifest.preprocess is not None
        self._layout = "" if manifest.preprocess is None else manifest.preprocess.model_layout
        labels = self._classify or self._detect  # CTC needs no labels: the answer itself contains the texts
        self.labels: tuple[str, ...] = labels.labels if labels is not None else ()

    def __call__(
        self,
        outputs: Arrays,
        placements: Sequence[Placement] | None,
        inputs: Sequence[NDArray[Any]],
        image: int,
        windows: Sequence[int] | None = None,
        before: NDArray[np.float32] | None = None,
    ) -> Arrays:
        """Return `outputs` followed by the results of the rules.

        Args:
            placements: The mapping from the model's image to each sent image; None if the app sent the model's own
                tensor.
            image: The index of the preprocessed input in `inputs`.
            windows: The number of items of each sent signal; None if the app sent the model's own tensor.
            before: The class scores of the signal's earlier windows, from `last_shares`.
        """
        added = list(outputs)
        if self._classify is not None:
            added += self._classifier(outputs[self._classify_index], windows, before)
        if self._detect is not None:
            size = height_and_width(inputs[image].shape, self._layout)
            arrays = [outputs[i] for i in self._detect_indices]
            added += detections(self._detect, arrays, size, placements)
        if self._ctc is not None:
            added += self._reader(outputs[self._ctc_index])
        if self._embed is not None:
            added.append(embeddings(self._embed, outputs[self._embed_index], inputs[self._mask_index]))
        return added

    def last_shares(self, outputs: Arrays, before: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the class scores of the last windows, to smooth the next windows."""
        shares = self._classifier.shares(outputs[self._classify_index])
        smooth = self._classify.smooth if self._classify is not None else None
        assert smooth is not None  # only smoothing needs earlier scores
        joined = np.concatenate((before, shares)) if len(before) else shares
        return np.array(joined[max(0, len(joined) - smooth.windows + 1) :], np.float32)

    def sent(self, raw: bool) -> list[int]:
        """Return the indices of the outputs that an answer contains.

        An answer to a `raw` image contains boxes or texts, but not the outputs that they come from, because these
        outputs have megabytes. The outputs of a signal are small. They are sent, because the health check sends signals
        and compares these outputs.
        """
        if not (raw and self._images):
            return list(range(len(self.outputs)))
        left_out = set(self._detect_indices) if self._detect is not None else set()
        left_out |= {self._ctc_index} if self._ctc is not None else set()
        return [i for i in range(len(self.outputs)) if i not in left_out]
