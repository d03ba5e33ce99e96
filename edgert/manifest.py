"""The manifest: all that a bundle says about itself. A value, checked once where it enters.

Canonical form is JSON with sorted keys, no spaces, ASCII: the same manifest always has the same bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgert.errors import BundleError, NotCompatible, RequestError
from edgert.tensors import TensorSpec

FORMAT = 1
MODEL_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
FILE_PATH = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*){0,7}")
FILE_PATH_LENGTH_MAX = 100  # what a USTAR header holds
FILES_MAX = 512
FILE_BYTES_MAX = 8 * 1024**3 - 1  # likewise
LABELS_MAX = 100_000
IMAGE_SIDE_MAX = 8192  # of what a model takes
DETECTIONS_MAX = 1000
LAYOUTS = ("nchw", "nhwc")
COLOURS = ("rgb", "bgr", "gray")
RESIZE_RULES = ("stretch", "crop", "letterbox")
RESIZE_FILTERS = ("nearest", "bilinear", "bicubic")
DETECT_FORMS = ("channels_first", "anchors_first")
DETECTED = ("detected_boxes", "detected_scores", "detected_classes", "detected_count")
BOX_FORMATS = ("cxcywh", "xyxy", "xywh", "yxyx")


@dataclass(frozen=True)
class FileEntry:
    """One regular file of the bundle."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Accuracy:
    """The receipt of the accuracy gate: `metric` on `samples` hold-out samples, FP32 source against artifact."""

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
        # Accuracies are ratios of counts: a drop equal to the limit must not fail on rounding.
        return self.drop <= self.max_drop + 1e-9


@dataclass(frozen=True)
class ArtifactEntry:
    """One engine's form of the model.

    `entry` is the file the engine opens, `files` all that it needs, `golden_outputs` one file an output.
    `golden_atol` is, per output, how far (absolute, in the output's unit) a device's answer to the golden
    inputs may lie from the golden outputs.
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
    """Which artifacts serve a device profile, best first, and on which processors (`uname -m`; none: any).

    `reference` is the FP32 artifact that live answers may be compared with; "" where the bundle carries none.
    """

    profile: str
    machines: tuple[str, ...]
    artifacts: tuple[str, ...]
    reference: str = ""


@dataclass(frozen=True)
class Resize:
    """How an image of any size comes to the model's: `height` x `width` pixels.

    "stretch" ignores the ratio of the sides. "crop" scales the shorter side to `shortest_side` (0: as little
    as covers the model's size) and takes the middle. "letterbox" keeps the ratio, puts the image in the middle
    and fills the rest with `pad_value`, before anything is normalised.
    """

    rule: str
    height: int
    width: int
    shortest_side: int = 0
    pad_value: int = 114
    filter: str = "bilinear"


@dataclass(frozen=True)
class Preprocess:
    """How UINT8 values given for `input` become what the model takes: (value * scale - mean) / std.

    `mean` and `std` hold one number, or one a channel. `layout` says how UINT8 tensors come: "nhwc", "nchw",
    or "model" for the axes of the model, which `model_layout` states. `colour` is the order of the model's
    channels, `frame_colour` that of the UINT8 tensors ("model": the same). With `resize` these tensors may
    have any height and width; with `decode` a JPEG or PNG file is taken as well.
    """

    input: str
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "model"
    model_layout: str = "nchw"
    colour: str = "rgb"
    frame_colour: str = "model"
    resize: Resize | None = None
    decode: bool = False

    @property
    def of_images(self) -> bool:
        """Whether requests may hold images of their own size: then a codec is needed on the device."""
        return self.decode or self.resize is not None


@dataclass(frozen=True)
class Classify:
    """Output `output` holds class scores along its last axis; `labels` names them; the top `top_k` are given."""

    output: str
    labels: tuple[str, ...]
    top_k: int = 1
    softmax: bool = True


@dataclass(frozen=True)
class Detect:
    """How a detector's outputs become boxes: scores at or over `score_threshold`, then NMS within each class.

    `boxes` names the output with boxes, A of them an image. With `scores` empty it also holds the scores:
    [N, 4 + C, A] in form "channels_first", [N, A, 4 + C] in "anchors_first", and one value more, between
    them, with `objectness`, which every score is multiplied with. Else `scores` names an output with C
    scores a box, in the same form. `sigmoid`: scores are logits. `normalised`: boxes count from 0 to 1 over
    the model's input, not its pixels.
    """

    boxes: str
    scores: str = ""
    labels: tuple[str, ...] = ()
    form: str = "channels_first"
    objectness: bool = False
    sigmoid: bool = False
    box_format: str = "cxcywh"
    normalised: bool = False
    score_threshold: float = 0.25
    iou_threshold: float = 0.45
    detections_max: int = 300

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.boxes, self.scores) if self.scores else (self.boxes,)


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds and promises. `downgrade` lets a device go back to this older release."""

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
    classify: Classify | None = None
    detect: Detect | None = None
    downgrade: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def artifact(self, artifact_id: str) -> ArtifactEntry:
        return next(a for a in self.artifacts if a.id == artifact_id)

    def file(self, path: str) -> FileEntry:
        return next(f for f in self.files if f.path == path)

    def files_for(self, target: TargetEntry) -> list[FileEntry]:
        """What a device of `target` keeps: its artifacts, the reference, and what they are checked by."""
        paths = set(self.golden_inputs)
        for name in (*target.artifacts, target.reference or target.artifacts[0]):
            artifact = self.artifact(name)
            paths |= {*artifact.files, *artifact.golden_outputs}
        return [entry for entry in self.files if entry.path in paths]

    def target_for(self, profile: str, machine: str) -> TargetEntry:
        """The target that a device of `profile` takes. Raises NotCompatible, naming what the bundle has."""
        for target in self.targets:
            if target.profile != profile:
                continue
            if target.machines and machine not in target.machines:
                raise NotCompatible(
                    f"target {profile} is for {', '.join(target.machines)}; this device is {machine}: "
                    "give the device the profile that fits it"
                )
            return target
        names = ", ".join(t.profile for t in self.targets)
        raise NotCompatible(
            f"the bundle is built for {names}; this device is a {profile}: build with --target {profile}"
        )

    def to_bytes(self) -> bytes:
        value = asdict(self)
        value["format"] = FORMAT
        for group in ("inputs", "outputs"):
            value[group] = [spec.as_json() for spec in getattr(self, group)]
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises BundleError when `data` is not a manifest that this version reads."""
        try:
            value = json.loads(data)
            if value["format"] != FORMAT:
                raise BundleError(
                    f"the bundle has format {value['format']!r}, this version reads {FORMAT}: update edgert on the device"
                )
            return _manifest(value)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, RequestError) as error:
            raise BundleError(f"the manifest cannot be read: {type(error).__name__}: {error}") from error


def _manifest(value: dict[str, Any]) -> Manifest:
    preprocess, classify, detect = (value.get(name) for name in ("preprocess", "classify", "detect"))
    return Manifest(
        model=str(value["model"]),
        release=int(value["release"]),
        inputs=tuple(TensorSpec.from_json(v) for v in value["inputs"]),
        outputs=tuple(TensorSpec.from_json(v) for v in value["outputs"]),
        files=tuple(FileEntry(str(v["path"]), int(v["size_bytes"]), str(v["sha256"])) for v in value["files"]),
        artifacts=tuple(_artifact(v) for v in value["artifacts"]),
        targets=tuple(
            TargetEntry(
                str(v["profile"]), _strings(v["machines"]), _strings(v["artifacts"]), str(v.get("reference", ""))
            )
            for v in value["targets"]
        ),
        golden_inputs=_strings(value["golden_inputs"]),
        source_sha256=str(value["source_sha256"]),
        source_size_bytes=int(value["source_size_bytes"]),
        preprocess=None if preprocess is None else _preprocess(preprocess),
        classify=None if classify is None else _classify(classify),
        detect=None if detect is None else _detect(detect),
        downgrade=bool(value["downgrade"]),
    )


def _artifact(value: dict[str, Any]) -> ArtifactEntry:
    accuracy = value["accuracy"]
    return ArtifactEntry(
        id=str(value["id"]),
        engine=str(value["engine"]),
        precision=str(value["precision"]),
        entry=str(value["entry"]),
        files=_strings(value["files"]),
        golden_outputs=_strings(value["golden_outputs"]),
        golden_atol=tuple(float(v) for v in value["golden_atol"]),
        accuracy=Accuracy(
            metric=str(accuracy["metric"]),
            samples=int(accuracy["samples"]),
            fp32=float(accuracy["fp32"]),
            artifact=float(accuracy["artifact"]),
            max_drop=float(accuracy["max_drop"]),
        ),
        tools={str(k): str(v) for k, v in value["tools"].items()},
    )


def _preprocess(value: dict[str, Any]) -> Preprocess:
    plain = Preprocess(**_known(Preprocess, value, "preprocessing"))
    return Preprocess(
        input=str(plain.input),
        scale=float(plain.scale),
        mean=tuple(float(v) for v in plain.mean),
        std=tuple(float(v) for v in plain.std),
        layout=str(plain.layout),
        model_layout=str(plain.model_layout),
        colour=str(plain.colour),
        frame_colour=str(plain.frame_colour),
        resize=None if plain.resize is None else _resize(value["resize"]),
        decode=bool(plain.decode),
    )


def _resize(value: dict[str, Any]) -> Resize:
    plain = Resize(**_known(Resize, value, "resizing"))
    return Resize(
        rule=str(plain.rule),
        height=int(plain.height),
        width=int(plain.width),
        shortest_side=int(plain.shortest_side),
        pad_value=int(plain.pad_value),
        filter=str(plain.filter),
    )


def _classify(value: dict[str, Any]) -> Classify:
    plain = Classify(**_known(Classify, value, "classification"))
    return Classify(
        output=str(plain.output),
        labels=_strings(plain.labels),
        top_k=int(plain.top_k),
        softmax=bool(plain.softmax),
    )


def _detect(value: dict[str, Any]) -> Detect:
    plain = Detect(**_known(Detect, value, "detection"))
    return Detect(
        boxes=str(plain.boxes),
        scores=str(plain.scores),
        labels=_strings(plain.labels),
        form=str(plain.form),
        objectness=bool(plain.objectness),
        sigmoid=bool(plain.sigmoid),
        box_format=str(plain.box_format),
        normalised=bool(plain.normalised),
        score_threshold=float(plain.score_threshold),
        iou_threshold=float(plain.iou_threshold),
        detections_max=int(plain.detections_max),
    )


def _known(cls: type[Any], value: dict[str, Any], what: str) -> dict[str, Any]:
    """`value`, where every key is a field of `cls`: one left out would silently change what the model is shown."""
    if unknown := sorted(set(value) - {field.name for field in fields(cls)}):
        raise BundleError(f"{what} states {', '.join(unknown)[:200]}, not known here: update edgert on the device")
    return value


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list of strings, got {type(values).__name__}")
    return tuple(str(v) for v in values)


def _check(manifest: Manifest) -> None:
    """Raise BundleError unless every name, reference and limit of `manifest` holds."""
    if not MODEL_NAME.fullmatch(manifest.model):
        raise BundleError(f"model name {manifest.model[:80]!r}: use a letter, then at most 62 of a-z 0-9 _ -")
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
            raise BundleError(f"target {target.profile} names artifacts that the bundle does not hold")
    if len(manifest.golden_inputs) != len(manifest.inputs) or not set(manifest.golden_inputs) <= paths:
        raise BundleError("golden inputs must be one file of the bundle per input")
    _check_processing(manifest)


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
        raise BundleError(f"artifact {artifact.id} names files that the bundle does not hold")
    if not len(artifact.golden_outputs) == len(artifact.golden_atol) == len(manifest.outputs):
        raise BundleError(f"artifact {artifact.id} must have golden values and a tolerance for each output")
    if not all(0 <= atol < float("inf") for atol in artifact.golden_atol):
        raise BundleError(f"artifact {artifact.id} has a tolerance that is no finite number")


def _check_processing(manifest: Manifest) -> None:
    if manifest.preprocess is not None:
        check_preprocess(manifest.preprocess, manifest.inputs)
    if manifest.classify is not None:
        check_classify(manifest.classify, manifest.outputs)
    if manifest.detect is not None:
        check_detect(manifest.detect, manifest.outputs)
        image = manifest.preprocess.input if manifest.preprocess is not None else manifest.inputs[0].name
        if not any(spec.name == image and len(spec.shape) == 4 for spec in manifest.inputs):
            raise BundleError(f"detection needs a model of images; input {image!r} has not 4 axes")
    made = postprocessed_names(manifest)
    if taken := sorted({spec.name for spec in manifest.outputs} & set(made)):
        raise BundleError(f"output {taken[0]!r} has the name of what post-processing adds: rename it in the model")


def postprocessed_names(manifest: Manifest) -> tuple[str, ...]:
    """The outputs that a daemon adds to the model's own, in order."""
    classify, detect = manifest.classify, manifest.detect
    classes = () if classify is None else (f"{classify.output}_classes", f"{classify.output}_probabilities")
    return (*classes, *(() if detect is None else DETECTED))


def check_preprocess(pre: Preprocess, inputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `pre` can be applied to one of `inputs`."""
    spec = next((s for s in inputs if s.name == pre.input), None)
    if spec is None:
        raise BundleError(f"preprocessing names input {pre.input!r}, which the model does not have")
    _check_choice("preprocessing", "layout", pre.layout, ("model", *LAYOUTS))
    _check_choice("preprocessing", "model_layout", pre.model_layout, LAYOUTS)
    _check_choice("preprocessing", "colour", pre.colour, COLOURS)
    _check_choice("preprocessing", "frame_colour", pre.frame_colour, ("model", *COLOURS))
    if (pre.frame_colour == "gray") != (pre.colour == "gray") and pre.frame_colour != "model":
        raise BundleError("preprocessing turns no gray into colour, nor back: give frame_colour as colour, or model")
    if not pre.mean or not pre.std or 0.0 in pre.std:
        raise BundleError("preprocessing needs a mean and a std, and no std may be 0")
    if not all(-1e30 < v < 1e30 for v in (pre.scale, *pre.mean, *pre.std)):
        raise BundleError("preprocessing needs a scale, a mean and a std that are finite")
    swapped = pre.frame_colour not in ("model", pre.colour)
    if pre.layout != "model" or pre.model_layout != "nchw" or pre.of_images or swapped:
        _check_image_input(pre, spec)
    if pre.resize is not None:
        _check_resize(pre.resize)


def _check_image_input(pre: Preprocess, spec: TensorSpec) -> None:
    if len(spec.shape) != 4:
        raise BundleError(f"preprocessing of images needs an input of 4 axes, {pre.input!r} has {len(spec.shape)}")
    channels, height, width = (
        spec.item_shape if pre.model_layout == "nchw" else (spec.shape[3], spec.shape[1], spec.shape[2])
    )
    if pre.resize is not None and not (height in (-1, pre.resize.height) and width in (-1, pre.resize.width)):
        raise BundleError(
            f"resizing gives {pre.resize.height} x {pre.resize.width}, input {pre.input!r} takes {height} x {width}"
        )
    if pre.of_images and channels != (1 if pre.colour == "gray" else 3):
        raise BundleError(f"preprocessing gives {pre.colour} images, input {pre.input!r} takes {channels} channels")
    if pre.decode and pre.resize is None and -1 in (height, width):
        raise BundleError(f"input {pre.input!r} has an open size: decoding images needs a resize rule")


def _check_resize(resize: Resize) -> None:
    _check_choice("resizing", "rule", resize.rule, RESIZE_RULES)
    _check_choice("resizing", "filter", resize.filter, RESIZE_FILTERS)
    if not (1 <= resize.height <= IMAGE_SIDE_MAX and 1 <= resize.width <= IMAGE_SIDE_MAX):
        raise BundleError(f"resizing to {resize.height} x {resize.width}: give sides of 1 to {IMAGE_SIDE_MAX}")
    if resize.shortest_side and not max(resize.height, resize.width) <= resize.shortest_side <= IMAGE_SIDE_MAX:
        raise BundleError(
            f"resizing has shortest_side {resize.shortest_side}: give at least the model's longer side, "
            f"at most {IMAGE_SIDE_MAX}, or 0"
        )
    if not 0 <= resize.pad_value <= 255:
        raise BundleError(f"resizing has pad_value {resize.pad_value}: give 0 to 255")


def check_classify(classify: Classify, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `classify` can be applied to one of `outputs`."""
    if classify.output not in {s.name for s in outputs}:
        raise BundleError(f"classification names output {classify.output!r}, which the model does not have")
    if classify.top_k < 1 or len(classify.labels) > LABELS_MAX:
        raise BundleError(f"classification needs top_k >= 1 and at most {LABELS_MAX} labels")


def check_detect(detect: Detect, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `detect` can be applied to `outputs`."""
    shapes = {spec.name: spec.shape for spec in outputs}
    if missing := [name for name in detect.outputs if name not in shapes]:
        raise BundleError(f"detection names output {missing[0]!r}, which the model does not have")
    if wrong := [name for name in detect.outputs if len(shapes[name]) != 3]:
        raise BundleError(f"detection needs outputs of 3 axes; {wrong[0]!r} has {len(shapes[wrong[0]])}")
    _check_choice("detection", "form", detect.form, DETECT_FORMS)
    _check_choice("detection", "box_format", detect.box_format, BOX_FORMATS)
    if not (0 <= detect.score_threshold <= 1 and 0 <= detect.iou_threshold <= 1):
        raise BundleError("detection needs a score_threshold and an iou_threshold from 0 to 1")
    if not 1 <= detect.detections_max <= DETECTIONS_MAX or len(detect.labels) > LABELS_MAX:
        raise BundleError(f"detection needs detections_max of 1 to {DETECTIONS_MAX} and at most {LABELS_MAX} labels")
    values = [shapes[name][1 if detect.form == "channels_first" else 2] for name in detect.outputs]
    least = 4 if detect.scores else 5 + detect.objectness
    if values[0] != -1 and (values[0] != 4 if detect.scores else values[0] < least):
        raise BundleError(f"output {detect.boxes!r} has {values[0]} values a box, form {detect.form} needs {least}")
    if detect.scores and detect.objectness:
        raise BundleError("detection has objectness only where boxes and scores are in one output")


def _check_choice(what: str, key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BundleError(f"{what} has {key} {value[:80]!r}; known: {', '.join(known)}")


def _check_unique(what: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise BundleError(f"two entries of kind {what} in the manifest have the same name")
