"""Runs artifacts on samples in a child process, each artifact in the engine that judges it."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.engines import EngineOptions, LocalArtifact, Session
from edgert.engines.padding import load_session
from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.reference import Outputs
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.processes.children import arrays_of
from edgert_deploy.packager.processes.vendor_output import quiet
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.samples.stateful_samples import run_in_turn
from edgert_deploy.packager.sources.source_model import SourceModel, reference_artifact

BATCH = 32  # the largest number of samples in a run, if the batch axis is open
ALONE_SAMPLES = 8  # the number of samples that run in a batch and then also alone
# The largest difference between these answers, as a share of the range of the answers: a few steps of INT8.
ALONE_TOLERANCE = 0.02


def reference_outputs(source: SourceModel, samples: CalibrationSet) -> Outputs:
    """Return the source's answers in its own engine: one array for each output, samples along axis 0."""
    with tempfile.TemporaryDirectory(prefix="edgert-reference-") as folder:
        return run_artifact(reference_artifact(source, Path(folder)), samples)


def artifact_outputs(artifact: Artifact, source: SourceModel, samples: CalibrationSet) -> Outputs:
    """Return the artifact's answers in the engine that judges it. Raises the errors of `run_artifact`."""
    return run_artifact(local_artifact(artifact, source), samples)


def judged_outputs(artifact: Artifact, source: SourceModel, samples: CalibrationSet) -> list[Outputs]:
    """Return the answers in batches. If samples that run alone get other answers, return these, too.

    Most requests to a device hold one sample, and an engine may use other kernels for a single sample. For example,
    OpenVINO computes an INT8 LSTM in integers only for a batch of 1, and then loses much accuracy. Raises the errors of
    `run_artifact`.
    """
    local = local_artifact(artifact, source)
    both = arrays_of(f"{__name__}:run_both_ways", samples, local)
    return [both[i : i + len(source.outputs)] for i in range(0, len(both), len(source.outputs))]


def local_artifact(artifact: Artifact, source: SourceModel) -> LocalArtifact:
    """Return the artifact in the form that its judging engine opens."""
    digest = hashlib.sha256(artifact.path.read_bytes()).hexdigest()
    return LocalArtifact(artifact.judged_by, artifact.path, source.inputs, source.outputs, digest, source.buckets)


def run_artifact(
    artifact: LocalArtifact,
    samples: CalibrationSet,
    threads: int = 0,
    extra: Mapping[str, Any] | None = None,
    batch: int = BATCH,
) -> Outputs:
    """Run all samples through an artifact in a child. Raises EngineMissing, EngineFailed or ChildFailed.

    With 0 `threads`, the engine chooses the number of its threads. `batch` is the largest number of samples in a run.
    """
    return arrays_of(f"{__name__}:run_here", samples, artifact, threads, dict(extra or {}), batch)


def run_here(
    samples: CalibrationSet, artifact: LocalArtifact, threads: int, extra: dict[str, Any], batch: int
) -> Outputs:
    """Run all samples: the child's side of `run_artifact`.

    Samples of a model with buckets run at their own length, because apps do not pad their samples. Samples of a model
    with state run in turn: each sample gets the state that the artifact computed from the previous samples. All other
    samples run in batches of at most `batch` samples. These batches have one size, because an engine may compile the
    model for each size, and a compilation takes longer than the runs.
    """
    run, size = _runner_and_batch(samples, [spec.name for spec in artifact.inputs], min(batch, samples.run_max))
    with quiet():  # TFLite prints the name of its delegate
        session = load_session(artifact, EngineOptions(threads, buckets=(size,), extra=extra))
    try:
        return run(session)
    finally:
        session.close()


def run_both_ways(samples: CalibrationSet, artifact: LocalArtifact) -> Outputs:
    """Run all samples in batches, then some of them alone: the child's side of `judged_outputs`."""
    names = [spec.name for spec in artifact.inputs]
    run, size = _runner_and_batch(samples, names, min(BATCH, samples.run_max))
    with quiet():
        session = load_session(artifact, EngineOptions(buckets=tuple({1, size})))
    try:
        answers = run(session)
        if size == 1 or session.inputs[0].shape[0] != -1:
            return answers
        rows = np.unique(np.linspace(0, len(samples) - 1, ALONE_SAMPLES).astype(int))
        alone = run_samples(session, [samples.inputs[name][rows] for name in names], batch=1)
        if all(_alike(a[rows], b) for a, b in zip(answers, alone, strict=True)):
            return answers
        return answers + run_samples(session, [samples.inputs[name] for name in names], batch=1)
    finally:
        session.close()


def _alike(answers: NDArray[Any], alone: NDArray[Any]) -> bool:
    if answers.dtype.kind != "f":
        return bool(np.array_equal(answers, alone))
    return bool(np.allclose(answers, alone, rtol=0.0, atol=ALONE_TOLERANCE * float(np.ptp(answers)), equal_nan=True))


def _runner_and_batch(
    samples: CalibrationSet, names: Sequence[str], most: int
) -> tuple[Callable[[Session], Outputs], int]:
    """Return a function that runs the samples through a session, and the size of its batches."""
    if samples.buckets is not None and samples.lengths is not None:
        return partial(_run_lengths, samples=samples, buckets=samples.buckets, lengths=samples.lengths), 1
    if samples.state and samples.recordings is not None:
        recordings, state = samples.recordings, samples.state
        return lambda session: run_in_turn(session, samples.inputs, recordings, state)[0], 1
    size = math.ceil(
        len(samples) / math.ceil(len(samples) / most)
    )  # the fewest batches; engines may pad a smaller last one
    return partial(run_samples, inputs=[samples.inputs[name] for name in names], batch=size), size


def run_samples(session: Session, inputs: Sequence[NDArray[Any]], batch: int = BATCH) -> Outputs:
    """Run all samples through `session`: `batch` at once if its batch axis is open, else one by one."""
    if session.inputs[0].shape[0] != -1:
        batch = 1
    runs = [session.run([array[i : i + batch] for array in inputs]) for i in range(0, len(inputs[0]), batch)]
    for spec, *parts in zip(session.outputs, *runs, strict=True):
        _check_lengths(spec, parts, len(inputs[0]))
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def _check_lengths(spec: TensorSpec, parts: Sequence[NDArray[Any]], count: int) -> None:
    """Raise SourceInvalid if the length of an answer depends on the values of its sample."""
    for part in parts:
        if any(length not in (-1, found) for length, found in zip(spec.shape, part.shape, strict=True)):
            raise SourceInvalid(
                f"output {spec.name!r} has shape {list(spec.shape)} for a sample of zeros and {list(part.shape)} for "
                "another sample: its length depends on the values, and apps need a fixed length. Export the model without the "
                "loop or the selection that determines the length. If a BOOL input selects, fix it with --input NAME=true"
            )
    if (rows := sum(map(len, parts))) != count:
        raise SourceInvalid(
            f"output {spec.name!r} has {rows} rows for {count} samples: its length depends on the values. Export the model "
            "without the loop or the selection that determines the length, so that axis 0 counts the samples"
        )


def _run_lengths(session: Session, samples: CalibrationSet, buckets: Buckets, lengths: NDArray[np.int64]) -> Outputs:
    """Run the samples of each length. Return answers with the length of the largest bucket.

    The samples run one by one, because an engine may compile the model for each pair of a batch size and a length. Each
    answer is padded with its own last element. This padding changes no judgement.
    """
    whole: Outputs = []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        same_length = samples.rows(rows).cut(length)
        for i, answer in enumerate(
            run_samples(session, [same_length.inputs[spec.name] for spec in session.inputs], batch=1)
        ):
            for cut in buckets.outputs:
                if cut.name == session.outputs[i].name:
                    missing = cut.length(buckets.largest) - answer.shape[cut.axis]
                    ends = [(0, missing if axis == cut.axis else 0) for axis in range(answer.ndim)]
                    answer = np.pad(answer, ends, mode="edge")
            if len(whole) == i:
                whole.append(np.empty((len(samples), *answer.shape[1:]), answer.dtype))
            whole[i][rows] = answer
    return whole
