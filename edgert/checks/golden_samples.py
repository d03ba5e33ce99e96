"""Golden samples: the inputs in a bundle, and the check that this device's answers equal the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import ArtifactEntry
from edgert.engines import EngineOptions, Session
from edgert.engines.padding import Padder, load_session
from edgert.errors import BundleCorrupt, HealthCheckFailed
from edgert.printable import counted
from edgert.versions.installed import InstalledVersion, check_files, read_file

Arrays = list[NDArray[Any]]


def samples(version: InstalledVersion, *, as_sent: bool = False) -> Iterator[Arrays]:
    """Yield the golden inputs, one sample at a time, each in its own length.

    Samples come one at a time, because some models have a fixed batch of one. With `as_sent`, the inputs are those that
    an app sends: the windows of a signal instead of their features, and a text instead of its tokens. These inputs
    contain no state, because golden samples start with a state of zeros.
    """
    manifest = version.manifest
    padder = padder_of(version)
    arrays = [_read(version, path) for path in manifest.golden_inputs]
    if as_sent:
        rule = manifest.input_rule
        by_name = dict(zip((spec.name for spec in manifest.inputs), arrays, strict=True))
        names = [spec.name for spec in manifest.app_inputs]
        if manifest.golden_raw and rule is not None:
            lead = manifest.sound.lead if manifest.sound is not None else 0  # the device adds the lead
            by_name[rule.input] = _read(version, manifest.golden_raw)[:, lead:]
            names = list(manifest.sent_inputs)
            padder = None  # each text keeps its own length
        arrays = [by_name[name] for name in names]
    for sample, length in zip(_rows(arrays), _lengths(padder, _count(arrays)), strict=True):
        yield sample if padder is None else padder.trimmed(sample, length)


def check(
    version: InstalledVersion, artifact: ArtifactEntry, infer: Callable[[Arrays], Arrays], *, as_sent: bool = False
) -> list[float]:
    """Pass every golden sample to `infer`.

    Return the largest absolute difference from the host, per output. Raises the errors of `infer`; also
    HealthCheckFailed if a difference exceeds the signed tolerance, and BundleCorrupt if the golden values changed on
    disk. `infer` returns the outputs for the inputs of one sample. With `as_sent`, it gets the inputs that an app
    sends, and returns the outputs that an app gets.
    """
    answers = [infer(sample) for sample in samples(version, as_sent=as_sent)]
    golden_outputs = list(_golden_outputs(version, artifact))
    if len(golden_outputs) != len(answers):
        raise HealthCheckFailed(
            f"{artifact.id} has {counted(len(golden_outputs), 'golden answer')} for {counted(len(answers), 'golden sample')}"
        )
    worst = []
    manifest = version.manifest
    specs = manifest.app_outputs if as_sent else manifest.outputs
    for at, spec in enumerate(specs):
        i = manifest.outputs.index(spec)
        atol = artifact.golden_atol[i]
        differences = [
            _difference(spec.name, want[i], got[at]) for want, got in zip(golden_outputs, answers, strict=True)
        ]
        worst.append(float(np.max(differences, initial=0.0)))
        if not worst[-1] <= atol:  # written so that NaN fails
            for path in filter(None, (*manifest.golden_inputs, manifest.golden_raw, *artifact.golden_outputs)):
                read_file(version, path)  # raises BundleCorrupt if the disk changed the golden values
            raise HealthCheckFailed(
                f"output {spec.name!r} of {artifact.id} differs from its golden values by {worst[-1]:.6g}, "
                f"more than {atol:.6g}: this device computes other values than the host"
            )
    return worst


def load_checked(
    version: InstalledVersion, artifact: ArtifactEntry, options: EngineOptions
) -> tuple[Session, list[float]]:
    """Load an artifact and check its files and its golden answers.

    Returns the engine session and the result of `check`. Raises BundleCorrupt, EngineMissing, EngineFailed and
    HealthCheckFailed.
    """
    check_files(version, artifact)
    session = load_session(version.local(artifact), options)
    try:
        return session, check(version, artifact, session.run)
    except BaseException:
        session.close()
        raise


def padder_of(version: InstalledVersion) -> Padder | None:
    """Return the padder of the model's buckets; None for a model without buckets."""
    manifest = version.manifest
    return None if manifest.buckets is None else Padder(manifest.buckets, manifest.inputs, manifest.outputs)


def _golden_outputs(version: InstalledVersion, artifact: ArtifactEntry) -> Iterator[Arrays]:
    """Yield the golden answer to each golden sample."""
    padder = padder_of(version)
    rows = list(_rows([_read(version, path) for path in artifact.golden_outputs]))
    for answer, length in zip(rows, _lengths(padder, len(rows)), strict=True):
        yield answer if padder is None else padder.cut(answer, length)


def _count(arrays: Arrays) -> int:
    """Return the number of golden samples. Raises BundleCorrupt for 0, which would pass every check."""
    shapes = {array.shape[:1] for array in arrays}
    if len(shapes) != 1 or shapes <= {(), (0,)}:
        raise BundleCorrupt("the bundle has no golden samples, or files of different lengths: build it again")
    return len(arrays[0])


def _rows(arrays: Arrays) -> Iterator[Arrays]:
    for i in range(_count(arrays)):
        yield [array[i : i + 1] for array in arrays]


def _lengths(padder: Padder | None, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` golden samples; zeros if all have one length. Raises BundleCorrupt."""
    lengths = (0,) * count if padder is None else padder.buckets.golden_lengths
    if len(lengths) != count:
        raise BundleCorrupt(
            f"the manifest has {len(lengths)} lengths for {count} golden samples: build the bundle again"
        )
    return lengths


def _difference(name: str, want: NDArray[Any], got: NDArray[Any]) -> float:
    if got.shape != want.shape:
        raise HealthCheckFailed(f"output {name!r} has shape {list(got.shape)}, expected {list(want.shape)}")
    return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0.0))


def _read(version: InstalledVersion, path: str) -> NDArray[Any]:
    try:
        return np.asarray(np.load(version.folder / path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise BundleCorrupt(f"{version.folder / path} cannot be read: {error}") from error
