"""The near cache: answers a frame like an earlier, nearly equal frame. For cameras, off by default.

A frame's signature is its luma (ITU-R BT.601 weights) in at most GRID x GRID cells. Each cell is the mean of up to 4 x
4 sampled pixels. The distance of two frames is the largest difference of any cell, as a share of the range of values. A
small moving object changes its cell, but changes a mean over the frame very little. A kept signature does not change
when frames match it, so an old answer cannot survive a slow change.

The engine also answers the first FIRST_COMPARED near hits, and later one near hit in SAMPLE_EVERY. The cache compares
the two answers. If fewer than AGREEMENT_MIN of them agree, the near cache empties itself, turns off for a while, and
starts again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.backoff import Backoff, doubling
from edgert.checks.status import NearCacheStatus
from edgert.tensors import TensorSpec
from edgert.worker.shadow.agreement import compare

GRID = 16
SAMPLES_PER_CELL = 4  # samples in each direction
ENTRIES_MAX = 16
SAMPLE_EVERY = 50
FIRST_COMPARED = 10
RECENT_MAX = 50  # the number of comparisons from which the agreement is computed
AGREEMENT_MIN = 0.95
OFF_S = 60.0
OFF_S_MAX = 3600.0
LUMA = (0.299, 0.587, 0.114)

Arrays = list[NDArray[Any]]


class NearLookup(NamedTuple):
    """The result of a lookup. If it is `sampled`, also run the engine, and call `count_agreement`.

    `outputs` is the answer of the nearest kept frame; None if no kept frame is within the distance.
    """

    signature: NDArray[np.float32]
    outputs: Arrays | None
    sampled: bool


class _Entry(NamedTuple):
    signature: NDArray[np.float32]
    outputs: Arrays
    born_s: float


class NearCache:
    """Answers single items of a model whose first input is an image. Every method is thread-safe.

    Args:
        distance: The largest distance of two frames that get the same answer, as a share of `value_range`, from 0 to 1.
        value_range: The range of the values of `image`.
        scores: The index of the output with class scores, if there is one.
    """

    def __init__(
        self,
        image: TensorSpec,
        distance: float,
        value_range: float,
        ttl_s: float,
        scores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        axes = image_axes(image)
        assert axes is not None, "the caller calls image_axes first"
        self._channels = axes
        self._distance = distance
        self._scale = 1.0 / (value_range or 1.0)
        self._ttl_s = ttl_s
        self._scores = scores
        self._clock = clock
        self._mutex = threading.Lock()
        self._entries: deque[_Entry] = deque(maxlen=ENTRIES_MAX)
        self._recent: deque[bool] = deque(maxlen=RECENT_MAX)
        self._until_sample = 0
        self._to_compare = FIRST_COMPARED
        self._backoff = Backoff(doubling(OFF_S, OFF_S_MAX))
        self._off_until_s = 0.0
        self.lookups = self.hits = self.sampled = self.agreed = 0
        self._distance_sum = self._distance_max = 0.0

    @property
    def on(self) -> bool:
        return self._clock() >= self._off_until_s

    def look_up(self, image: NDArray[Any]) -> NearLookup:
        """Look up `image`: one item of the model's first input, with its batch axis."""
        signature = self.signature(image)
        with self._mutex:
            self.lookups += 1
            entry, distance = self._nearest(signature)
            if entry is None:
                return NearLookup(signature, None, False)
            if self._to_compare or self._until_sample <= 0:
                self._until_sample = SAMPLE_EVERY
                return NearLookup(signature, entry.outputs, True)
            self._until_sample -= 1
            self.hits += 1
            self._distance_sum += distance
            self._distance_max = max(self._distance_max, distance)
            return NearLookup(signature, entry.outputs, False)

    def keep(self, lookup: NearLookup, outputs: Sequence[NDArray[Any]]) -> None:
        """Keep the engine's answer to a frame that is near to no kept frame."""
        copies = [array.copy() for array in outputs]
        for array in copies:
            array.flags.writeable = False
        with self._mutex:
            self._entries.append(_Entry(lookup.signature, copies, self._clock()))

    def count_agreement(self, lookup: NearLookup, outputs: Sequence[NDArray[Any]]) -> None:
        """Compare the kept answer with the engine's answer."""
        assert lookup.outputs is not None, "only a near hit can be compared"
        agrees = compare(lookup.outputs, outputs, self._scores).agrees
        with self._mutex:
            self.sampled += 1
            self.agreed += agrees
            self._recent.append(agrees)
            self._to_compare = max(0, self._to_compare - 1)
            wrong = len(self._recent) - sum(self._recent)
            # Even if all further comparisons agree, the window has more disagreements than AGREEMENT_MIN allows.
            if wrong > (1 - AGREEMENT_MIN) * max(len(self._recent), 2 * FIRST_COMPARED):
                self._turn_off()
            elif len(self._recent) == RECENT_MAX:
                self._backoff.reset()

    def signature(self, image: NDArray[Any]) -> NDArray[np.float32]:
        """Return GRID x GRID means of luma (fewer for a smaller image), flat, as shares of the value range."""
        frame = image[0]
        if self._channels == 0:
            frame = np.moveaxis(frame, 0, -1)
        height, width = frame.shape[:2]
        rows, columns = _samples(height), _samples(width)
        sampled = frame[rows][:, columns].astype(np.float32)
        weights = np.array(LUMA, np.float32) if sampled.shape[2] >= 3 else np.ones(1, np.float32)
        luma = sampled[:, :, : len(weights)] @ weights
        down, across = min(GRID, height), min(GRID, width)
        cells = luma.reshape(down, len(rows) // down, across, len(columns) // across).mean(axis=(1, 3))
        signature: NDArray[np.float32] = (cells.ravel() * self._scale).astype(np.float32)
        return signature

    def figures(self) -> dict[str, float]:
        with self._mutex:
            return {
                "near_lookup_total": self.lookups,
                "near_hit_total": self.hits,
                "near_sampled_total": self.sampled,
                "near_agree_total": self.agreed,
                "near_distance_max": round(self._distance_max, 5),
            }

    def status(self) -> NearCacheStatus:
        with self._mutex:
            return NearCacheStatus(
                on=self.on,
                why=self._why(),
                distance=self._distance,
                lookups=self.lookups,
                hits=self.hits,
                hit_rate=round(self.hits / self.lookups, 4) if self.lookups else 0.0,
                distance_mean=round(self._distance_sum / self.hits, 5) if self.hits else 0.0,
                distance_max=round(self._distance_max, 5),
                sampled=self.sampled,
                agreed=self.agreed,
                agreement=round(self.agreed / self.sampled, 4) if self.sampled else None,
            )

    def _why(self) -> str:
        if not self.on:
            return f"off: fewer than {AGREEMENT_MIN:.0%} of the sampled answers agreed; on again in {self._off_until_s - self._clock():.0f} s"
        if self._to_compare:
            return f"the engine also answers the next {self._to_compare} near hits, for comparison"
        return f"the engine also answers one near hit in {SAMPLE_EVERY}, for comparison"

    def _nearest(self, signature: NDArray[np.float32]) -> tuple[_Entry | None, float]:
        """Return the nearest kept frame within the distance, and its distance; drop expired frames."""
        now_s = self._clock()
        while self._entries and now_s - self._entries[0].born_s > self._ttl_s:
            self._entries.popleft()
        best: _Entry | None = None
        least = self._distance
        for entry in self._entries:
            distance = float(np.abs(entry.signature - signature).max())
            if distance <= least:
                best, least = entry, distance
        return best, least

    def _turn_off(self) -> None:
        self._off_until_s = self._clock() + self._backoff.failed()
        self._entries.clear()
        self._recent.clear()
        self._to_compare, self._until_sample = FIRST_COMPARED, 0


def image_axes(spec: TensorSpec) -> int | None:
    """Return which axis of an item holds the channels, 0 or 2.

    Return None if the items are not images of one size, or if no axis has 1, 3 or 4 channels.
    """
    item = spec.item_shape
    if len(item) != 3 or spec.shape[0] not in (-1, 1) or min(item) < 1:
        return None
    return next((axis for axis in (2, 0) if item[axis] in (1, 3, 4)), None)


def _samples(length: int) -> NDArray[np.intp]:
    """Return the rows (or columns) to sample: SAMPLES_PER_CELL for each cell, spread evenly, or all."""
    cells = min(GRID, length)
    count = cells * min(SAMPLES_PER_CELL, length // cells)
    return ((np.arange(count) + 0.5) * length / count).astype(np.intp)
