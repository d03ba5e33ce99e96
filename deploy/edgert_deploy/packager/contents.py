"""The contents of a bundle: its manifest, and the paths on this host of the files that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import __version__
from edgert.bundle.buckets import Buckets
from edgert.bundle.manifest import ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.bundle.rules import Preprocess
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.text_rules import TOKENIZER, Text
from edgert.processing.preprocessors import InputRule
from edgert_deploy.packager import receipt
from edgert_deploy.packager.accuracy.golden_samples import tolerances
from edgert_deploy.packager.accuracy.reference import Outputs
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.candidates.choice import Choice, all_packed
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.sources.source_model import SourceModel


@dataclass(frozen=True)
class Golden:
    """The golden samples, and the tolerances of each artifact.

    Attributes:
        inputs: One array for each input of the model.
        tolerances: The tolerance of each output, by the artifact's id.
        raw: The windows of signals, or the texts, from which the inputs were made.
        lengths: The length of each sample, for a model with buckets.
    """

    inputs: Outputs
    tolerances: Mapping[str, tuple[float, ...]]
    raw: NDArray[Any] | None
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Contents:
    """The manifest, and the files: `files` maps each name in the bundle to the file on this host."""

    manifest: Manifest
    files: Mapping[str, Path]


def golden_samples(evaluation: Evaluation, choices: Sequence[Choice], progress: Progress) -> Golden:
    """Return the golden samples, with tolerances from runs in every way in which each engine can compute."""
    samples, files = evaluation.golden_set, {}
    progress("comparing each artifact's answers between kernels and between numbers of threads")
    for name, candidate in all_packed(choices).items():
        answers = evaluation.answers
        files[name] = tolerances(candidate.artifact, evaluation.source, samples, candidate.golden, answers)
    return Golden(evaluation.golden_inputs(), files, samples.raw, samples.lengths)


def write_contents(
    request: BuildRequest, choices: Sequence[Choice], golden: Golden, receipt_bytes: bytes, work: Path
) -> Contents:
    """Write the receipt and the golden samples into `work`, and describe every file of the bundle."""
    files = _Files(work)
    files.paths[receipt.PATH] = work / receipt.PATH
    files.paths[receipt.PATH].write_bytes(receipt_bytes)
    rule = files.add_tokenizer(request.preprocess)
    inputs = tuple(files.save(f"golden/inputs/{i}.npy", array) for i, array in enumerate(golden.inputs))
    raw = "" if golden.raw is None else files.save("golden/raw.npy", golden.raw)
    packed = all_packed(choices).items()
    artifacts = tuple(files.add(name, candidate, golden.tolerances[name]) for name, candidate in packed)
    manifest = Manifest(
        model=request.model,
        release=request.release,
        inputs=request.source.inputs,
        outputs=request.source.outputs,
        files=files.entries(),
        artifacts=artifacts,
        targets=tuple(_target(choice) for choice in choices),
        golden_inputs=inputs,
        source_sha256=request.source.sha256,
        source_size_bytes=request.source.size_bytes,
        preprocess=rule if isinstance(rule, Preprocess) else None,
        sound=rule if isinstance(rule, Sound) else None,
        series=rule if isinstance(rule, Series) else None,
        text=rule if isinstance(rule, Text) else None,
        golden_raw=raw,
        classify=request.classify,
        detect=request.detect,
        ctc=request.ctc,
        embed=request.embed,
        downgrade_from=request.downgrade_from,
        expires=request.expires,
        signed_at=request.signed_at,
        buckets=_buckets(request.source, golden),
        state=request.source.state,
        state_id=request.state_id,
    )
    return Contents(manifest, files.paths)


class _Files:
    """The files of a bundle: `paths` maps each name in the bundle to the file on this host."""

    def __init__(self, work: Path) -> None:
        self._folder = work / "files"
        self.paths: dict[str, Path] = {}

    def save(self, name: str, array: NDArray[Any]) -> str:
        """Write an .npy file and return its name. The same array gives the same bytes."""
        path = self.paths[name] = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        return name

    def add_tokenizer(self, rule: InputRule | None) -> InputRule | None:
        """Add the tokenizer of a rule for text. Return the rule with the name of that file in the bundle."""
        if not isinstance(rule, Text):
            return rule
        self.paths[TOKENIZER] = Path(rule.tokenizer)
        return replace(rule, tokenizer=TOKENIZER)

    def add(self, name: str, candidate: Candidate, tolerance: tuple[float, ...]) -> ArtifactEntry:
        """Add the files of an artifact and its golden answers. Return the artifact's entry in the manifest."""
        artifact = candidate.artifact
        names = {path: f"artifacts/{name}/{path.name}" for path in (artifact.path, *artifact.companions)}
        self.paths.update({inside: path for path, inside in names.items()})
        return ArtifactEntry(
            id=name,
            engine=artifact.engine,
            precision=artifact.kind,
            entry=names[artifact.path],
            files=tuple(sorted(names.values())),
            golden_outputs=tuple(
                self.save(f"golden/{name}/{i}.npy", array) for i, array in enumerate(candidate.golden)
            ),
            golden_atol=tolerance,
            accuracy=candidate.result.accuracy,
            tools={"edgert": __version__, **artifact.tools},
        )

    def entries(self) -> tuple[FileEntry, ...]:
        """Return the size and the hash of every file, sorted by name."""
        contents = ((name, self.paths[name].read_bytes()) for name in sorted(self.paths))
        return tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents)


def _buckets(source: SourceModel, golden: Golden) -> Buckets | None:
    """Return the model's buckets with the lengths of the golden samples."""
    if source.buckets is None or golden.lengths is None:
        return source.buckets
    return replace(source.buckets, golden_lengths=tuple(golden.lengths.tolist()))


def _target(choice: Choice) -> TargetEntry:
    packed = tuple(candidate.id for candidate in choice.packed)
    reference = "" if choice.reference is None else choice.reference.id
    return TargetEntry(choice.profile.name, choice.profile.machines, packed, reference)
