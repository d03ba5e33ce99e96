"""Finds models whose answer to a sample depends on the other samples of its batch.

Such a model must run with a batch of 1: on a device, the other samples come from other clients. An example is a
spectrogram that limits its values by the loudest value of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.tensor_specs import OneSampleOnly

LOUDER = 1e5  # the factor of the noise that replaces the second sample: 100 dB, because spectrograms often keep 80 dB
TOLERANCE = 1e-4  # as a share of the largest value; the two runs have the same shapes, so they differ less

Array = NDArray[Any]
Run = Callable[[dict[str, Array]], list[Any]]


def check_samples_are_independent(run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise OneSampleOnly if the answer to a sample changes with the other sample of a batch of two.

    The samples are noise. Whole numbers are 1 or 0, so that they are valid tokens. A batch that `run` refuses proves
    nothing, and neither do the answers of a model that draws random numbers.
    """
    try:
        alike, mixed = run(_two(inputs, same=True)), run(_two(inputs, same=False))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the runtime's exceptions share no base class
        return
    changed = _changed(alike, mixed)
    if changed is not None and _changed(alike, run(_two(inputs, same=True))) is None:
        raise OneSampleOnly(
            f"output {outputs[changed].name!r} of a sample depends on the other samples of its batch; export the model so "
            "that it computes each sample alone, or with the batch fixed to 1"
        )


def _changed(before: list[Any], after: list[Any]) -> int | None:
    """Return the number of an output whose first sample differs; None if there is no such output.

    An output whose number of rows depends on the values has no row for each sample.
    """
    pairs = enumerate(zip(before, after, strict=True))
    return next((i for i, (a, b) in pairs if len(a) == len(b) == 2 and not _same(a[0], b[0])), None)


def _two(inputs: Sequence[TensorSpec], *, same: bool) -> dict[str, Array]:
    """Return two samples for each input. The first sample is always the same; the second one may equal it."""
    return {spec.name: np.stack([(first := _sample(spec, 1)), first if same else _other(spec)]) for spec in inputs}


def _other(spec: TensorSpec) -> Array:
    return np.asarray(LOUDER * _sample(spec, 2) if spec.dtype.kind == "f" else np.zeros_like(_sample(spec, 2)))


def _sample(spec: TensorSpec, seed: int) -> Array:
    if spec.dtype.kind != "f":
        return np.ones(spec.shape[1:], spec.dtype)
    return np.random.default_rng(seed).standard_normal(spec.shape[1:], np.float32).astype(spec.dtype)


def _same(a: Array, b: Array) -> bool:
    if a.dtype.kind != "f" or a.shape != b.shape:
        return np.array_equal(a, b)
    atol = TOLERANCE * float(np.abs(a).max(initial=0.0, where=np.isfinite(a)))
    return np.allclose(a, b, rtol=TOLERANCE, atol=atol, equal_nan=True)
