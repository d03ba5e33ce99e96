"""The manifest: the signed description of a bundle. The constructor checks its values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgert.bundle.buckets import Buckets, check_buckets
from edgert.bundle.document import Document
from edgert.bundle.expiry import expiry_time
from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess, check_rules
from edgert.bundle.signal_rules import Series, Sound, check_series, check_smoothing, check_sound
from edgert.bundle.state import State, Stateful, check_state
from edgert.bundle.text_rules import Embed, Text, check_embed, check_text
from edgert.errors import BundleError, NotCompatible
from edgert.names import NAME, NAME_RULE
from edgert.tensors import TensorSpec

FILE_PATH = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*){0,7}")
FILE_PATH_LENGTH_MAX = 100  # the limit of a USTAR header
FILES_MAX = 512
FILE_BYTES_MAX = 8 * 1024**3 - 1  # the limit of a USTAR header
# Accuracies are ratios of counts. Rounding may raise a drop that equals the limit; with this margin, it still passes.
ROUNDING_MARGIN = 1e-9


@dataclass(frozen=True)
class FileEntry:
    """One regular file of the bundle."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Accuracy:
    """The accuracy gate's result: `metric` of FP32 source and artifact, on `samples` hold-out samples."""

    metric: str
    samples: int
    fp32: float
    artifact: float
    max_drop: float

    @property
    def drop(self) -> float:
        return self.fp32 - self.artifact

    @property
    def passed(self) -> bool:
        return self.drop <= self.max_drop + ROUNDING_MARGIN


@dataclass(frozen=True)
class ArtifactEntry:
    """One engine's form of the model.

    Attributes:
        entry: The file that the engine opens.
        golden_outputs: One file per output, with the answers to the golden inputs.
        golden_atol: One limit per output, in the output's unit: the largest absolute difference between the golden
            outputs and a device's answers.
        tools: The versions of the tools that built the artifact, by name.
    """

    id: str
    engine: str
    precision: str
    entry: str
    files: tuple[str, ...]
    golden_outputs: tuple[str, ...]
    golden_atol: tuple[float, ...]
    accuracy: Accuracy
    tools: dict[str, str]


@dataclass(frozen=True)
class TargetEntry:
    """The artifacts for a device profile, in order of preference.

    `machines` are the profile's processors, as `uname -m` names them; an empty tuple allows every processor. A shadow
    compares live answers with `reference`, an FP32 artifact; "" if the bundle has no reference.
    """

    profile: str
    machines: tuple[str, ...]
    artifacts: tuple[str, ...]
    reference: str = ""


@dataclass(frozen=True)
class Manifest(Stateful, Document):
    """The content of a bundle.

    An installed version continues to serve after the bundle has expired. A bundle that is signed as a downgrade always
    has an expiry.

    Attributes:
        downgrade_from: The highest release that this lower release may replace; 0 for no downgrade.
        expires: The time until which a device may install the bundle, as 2027-02-19T08:00:00Z; "" for no end.
        signed_at: The time of the signature of a bundle that expires. It is "" for other bundles, so that the same
            inputs give the same bytes.
        golden_raw: The file with the windows or texts from which the golden inputs were computed; "" for none.
        buckets: The lengths that the model is built for along an open axis (not the batch axis); None for no buckets.
        state: The outputs that become inputs of a session's next item. Apps see neither these outputs nor these inputs.
        state_id: A name for the form of the state. Versions with the same name continue each other's sessions.
    """

    WHAT = "the bundle's manifest"

    model: str
    release: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: tuple[FileEntry, ...]
    artifacts: tuple[ArtifactEntry, ...]
    targets: tuple[TargetEntry, ...]
    golden_inputs: tuple[str, ...]
    source_sha256: str
    source_size_bytes: int
    preprocess: Preprocess | None = None
    sound: Sound | None = None
    series: Series | None = None
    text: Text | None = None
    golden_raw: str = ""
    classify: Classify | None = None
    detect: Detect | None = None
    ctc: Ctc | None = None
    embed: Embed | None = None
    downgrade_from: int = 0
    expires: str = ""
    signed_at: str = ""
    buckets: Buckets | None = None
    state: tuple[State, ...] = ()
    state_id: str = ""

    def __post_init__(self) -> None:
        _check(self)

    def may_follow(self, ratchet: int) -> bool:
        """Return whether a device accepts this release if `ratchet` is the highest release marked good."""
        return self.release >= ratchet or self.downgrade_from >= ratchet

    @property
    def input_rule(self) -> Preprocess | Sound | Series | Text | None:
        """The rule for the input that devices preprocess; None if devices preprocess no input."""
        return self.preprocess or self.sound or self.series or self.text

    @property
    def sent_inputs(self) -> tuple[str, ...]:
        """The inputs in a request before preprocessing. One text stands for several inputs of the model."""
        from_text = self.text.inputs[1:] if self.text is not None else ()
        return tuple(spec.name for spec in self.app_inputs if spec.name not in from_text)

    def artifact(self, artifact_id: str) -> ArtifactEntry:
        return next(a for a in self.artifacts if a.id == artifact_id)

    def file(self, path: str) -> FileEntry:
        return next(f for f in self.files if f.path == path)

    def artifact_bytes(self, artifact: ArtifactEntry) -> int:
        return sum(self.file(path).size_bytes for path in artifact.files)

    def files_for(self, target: TargetEntry) -> list[FileEntry]:
        """Return the files that a device of `target` stores: artifacts, reference, and their golden samples."""
        paths = {*self.golden_inputs, self.golden_raw, "" if self.text is None else self.text.tokenizer}
        for name in (*target.artifacts, target.reference or target.artifacts[0]):
            artifact = self.artifact(name)
            paths |= {*artifact.files, *artifact.golden_outputs}
        return [entry for entry in self.files if entry.path in paths]

    def target_for(self, profile: str, machine: str) -> TargetEntry:
        """Return the target for a device of `profile`. Raises NotCompatible, which names the bundle's targets."""
        for target in self.targets:
            if target.profile != profile:
                continue
            if target.machines and machine not in target.machines:
                raise NotCompatible(
                    f"target {profile} is for {', '.join(target.machines)}; this device is {machine}: "
                    "give the device the profile of its processor"
                )
            return target
        names = ", ".join(t.profile for t in self.targets)
        raise NotCompatible(
            f"the bundle is for {names}; this device has profile {profile}: build with --target {profile}"
        )


def _check(manifest: Manifest) -> None:
    """Raise BundleError unless every name, reference and limit of `manifest` is valid."""
    if not NAME.fullmatch(manifest.model):
        raise BundleError(f"model name {manifest.model[:80]!r}: {NAME_RULE}")
    if manifest.expires or manifest.signed_at:
        _check_times(manifest)
    if manifest.downgrade_from and not (manifest.release < manifest.downgrade_from < 2**53 and manifest.expires):
        raise BundleError(
            f"release {manifest.release} is signed as a downgrade from release {manifest.downgrade_from}: a downgrade must "
            "replace a higher release, and have an expiry"
        )
    if not 1 <= manifest.release < 2**53:
        raise BundleError(f"release {manifest.release}: give a whole number from 1 up")
    if not (manifest.inputs and manifest.outputs and manifest.artifacts and manifest.targets):
        raise BundleError("a bundle needs at least one input, output, artifact and target")
    _check_files(manifest.files)
    paths = {file.path for file in manifest.files}
    for artifact in manifest.artifacts:
        _check_artifact(artifact, manifest, paths)
    _check_unique("artifact", [a.id for a in manifest.artifacts])
    _check_unique("target", [t.profile for t in manifest.targets])
    _check_unique("input", [s.name for s in manifest.inputs])
    _check_unique("output", [s.name for s in manifest.outputs])
    ids = {a.id for a in manifest.artifacts}
    for target in manifest.targets:
        if not target.artifacts or not {*target.artifacts, target.reference or target.artifacts[0]} <= ids:
            raise BundleError(f"target {target.profile} names artifacts that the bundle does not contain")
    if len(manifest.golden_inputs) != len(manifest.inputs) or not set(manifest.golden_inputs) <= paths:
        raise BundleError("golden inputs must be one file of the bundle per input")
    _check_processing(manifest, paths)


def _check_processing(manifest: Manifest, paths: set[str]) -> None:
    """Raise BundleError unless the rules fit the model's inputs and outputs, and each other."""
    rules = (manifest.preprocess, manifest.sound, manifest.series, manifest.text)
    if manifest.golden_raw and (manifest.golden_raw not in paths or not any(rules[1:])):
        raise BundleError(
            "golden_raw must name a file of the bundle, and the manifest must have a rule for sound, series or text"
        )
    if sum(rule is not None for rule in rules) > 1:
        raise BundleError("a manifest has one rule for an input: preprocess, sound, series or text")
    if manifest.sound is not None:
        check_sound(manifest.sound, manifest.app_inputs)
    if manifest.series is not None:
        check_series(manifest.series, manifest.app_inputs)
    if manifest.text is not None:
        check_text(manifest.text, manifest.app_inputs, manifest.buckets)
        if manifest.text.tokenizer not in paths:
            raise BundleError(f"text names the tokenizer {manifest.text.tokenizer[:80]!r}, which the bundle lacks")
    if manifest.embed is not None:
        check_embed(manifest.embed, manifest.app_inputs, manifest.app_outputs)
    if manifest.buckets is not None:
        check_buckets(manifest.buckets, manifest.inputs, manifest.outputs)
    specs = manifest.app_inputs, manifest.app_outputs
    check_rules(manifest.preprocess, manifest.classify, manifest.detect, *specs, manifest.ctc)
    check_smoothing(manifest.classify, manifest.sound or manifest.series)
    check_state(manifest.state, manifest.state_id, manifest.inputs, manifest.outputs)
    if manifest.state and manifest.buckets is not None:
        raise BundleError("a model with state cannot have buckets: give the axis the length of a chunk")


def _check_times(manifest: Manifest) -> None:
    try:
        signed_before_expiry = expiry_time(manifest.signed_at) < expiry_time(manifest.expires)
    except ValueError as error:
        raise BundleError(
            f"expires {manifest.expires[:40]!r}, signed at {manifest.signed_at[:40]!r}: "
            "give two times like 2027-02-19T08:00:00Z"
        ) from error
    if not signed_before_expiry:
        raise BundleError(f"the bundle expires at {manifest.expires}, but it is signed later, at {manifest.signed_at}")


def _check_files(files: tuple[FileEntry, ...]) -> None:
    if len(files) > FILES_MAX:
        raise BundleError(f"the bundle names {len(files)} files; at most {FILES_MAX} are allowed")
    _check_unique("file", [file.path for file in files])
    for file in files:
        if len(file.path) > FILE_PATH_LENGTH_MAX or not FILE_PATH.fullmatch(file.path) or ".." in file.path:
            raise BundleError(f"file name {file.path[:120]!r} is not allowed in a bundle")
        if not 0 <= file.size_bytes <= FILE_BYTES_MAX:
            raise BundleError(f"file {file.path} is {file.size_bytes} bytes; at most {FILE_BYTES_MAX} are allowed")
        if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
            raise BundleError(f"file {file.path} has no SHA-256")


def _check_artifact(artifact: ArtifactEntry, manifest: Manifest, paths: set[str]) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", artifact.id):
        raise BundleError(f"artifact id {artifact.id[:80]!r} is not allowed")
    if artifact.entry not in artifact.files or not {*artifact.files, *artifact.golden_outputs} <= paths:
        raise BundleError(f"artifact {artifact.id} names files that the bundle does not contain")
    if not len(artifact.golden_outputs) == len(artifact.golden_atol) == len(manifest.outputs):
        raise BundleError(f"artifact {artifact.id} must have golden values and a tolerance for each output")
    if not all(0 <= atol < float("inf") for atol in artifact.golden_atol):
        raise BundleError(f"artifact {artifact.id} has a tolerance that is not a finite number")


def _check_unique(what: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise BundleError(f"two entries of kind {what} in the manifest have the same name")
