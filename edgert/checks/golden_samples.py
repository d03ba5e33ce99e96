"""Golden vectors: inputs that ship with a bundle, and whether an engine here answers them as the host's did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import ArtifactEntry
from edgert.errors import BundleCorrupt, HealthCheckFailed
from edgert.versions.installed import InstalledVersion

Arrays = list[NDArray[Any]]


def samples(version: InstalledVersion) -> Iterator[Arrays]:
    """The golden inputs, one sample at a time: a model with a fixed batch of one takes no other."""
    arrays = [_read(version, path) for path in version.manifest.golden_inputs]
    for i in range(len(arrays[0])):
        yield [array[i : i + 1] for array in arrays]


def check(version: InstalledVersion, artifact: ArtifactEntry, ask: Callable[[Arrays], Arrays]) -> list[float]:
    """Put every golden sample to `ask`; the largest absolute difference per output.

    Raises HealthCheckFailed when one lies beyond the signed tolerance, and what `ask` raises.
    """
    answers = [ask(sample) for sample in samples(version)]
    worst = []
    for i, (spec, path, atol) in enumerate(
        zip(version.manifest.outputs, artifact.golden_outputs, artifact.golden_atol, strict=True)
    ):
        want, got = _read(version, path), np.concatenate([answer[i] for answer in answers])
        if got.shape != want.shape:
            raise HealthCheckFailed(f"output {spec.name!r} has shape {list(got.shape)}, expected {list(want.shape)}")
        difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
        worst.append(float(difference.max(initial=0.0)))
        if not worst[-1] <= atol:  # written so that NaN fails
            raise HealthCheckFailed(
                f"output {spec.name!r} of {artifact.id} differs from its golden values by {worst[-1]:.6g}, "
                f"more than {atol:.6g}: this device computes something else than the host did"
            )
    return worst


def _read(version: InstalledVersion, path: str) -> NDArray[Any]:
    try:
        return np.asarray(np.load(version.folder / path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise BundleCorrupt(f"{version.folder / path} cannot be read: {error}") from error
