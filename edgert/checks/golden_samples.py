"""Golden samples: inputs that ship with a bundle, and the check that answers here equal the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import ArtifactEntry
from edgert.engines import EngineOptions, Session, engine_by_name
from edgert.errors import BundleCorrupt, HealthCheckFailed
from edgert.versions.installed import InstalledVersion, check_files

Arrays = list[NDArray[Any]]


def samples(version: InstalledVersion) -> Iterator[Arrays]:
    """Yield the golden inputs, one sample at a time: a model with a fixed batch of one takes no other."""
    arrays = [_read(version, path) for path in version.manifest.golden_inputs]
    for i in range(len(arrays[0])):
        yield [array[i : i + 1] for array in arrays]


def check(version: InstalledVersion, artifact: ArtifactEntry, ask: Callable[[Arrays], Arrays]) -> list[float]:
    """Pass every golden sample to `ask` and return the largest absolute difference per output.

    Raises HealthCheckFailed where one is beyond the signed tolerance, and what `ask` raises.
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


def load_checked(
    version: InstalledVersion, artifact: ArtifactEntry, options: EngineOptions
) -> tuple[Session, list[float]]:
    """Load an artifact whose files and golden answers are right; return its session and what `check` found.

    Raises BundleCorrupt, EngineMissing, EngineFailed or HealthCheckFailed.
    """
    check_files(version, artifact)
    session = engine_by_name(artifact.engine).load(version.local(artifact), options)
    try:
        return session, check(version, artifact, session.run)
    except BaseException:
        session.close()
        raise


def _read(version: InstalledVersion, path: str) -> NDArray[Any]:
    try:
        return np.asarray(np.load(version.folder / path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise BundleCorrupt(f"{version.folder / path} cannot be read: {error}") from error
