"""Processing rules: how a device computes the model's input, and answers from the model's outputs.

Rules are values in the manifest. When the manifest is read, each rule is checked against the model's inputs or outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgert.errors import BundleError
from edgert.printable import counted
from edgert.tensors import TensorSpec
from edgert.typed_json import Closed

LABELS_MAX = 100_000
IMAGE_SIDE_MAX = 8192  # the longer side of a model's input images
DETECTIONS_MAX = 1000
NAMES_SHOWN_MAX = 16  # in a message
LAYOUTS = ("nchw", "nhwc")
CHANNELS = (1, 3, 4)  # the numbers of channels by which an axis is recognized as the axis of channels
COLOURS = ("rgb", "bgr", "gray")
RESIZE_RULES = ("stretch", "crop", "letterbox")
RESIZE_FILTERS = ("nearest", "bilinear", "bicubic")
SMOOTH_RULES = ("mean", "majority", "all")
SMOOTH_WINDOWS_MAX = 1000
TIME_AXES = ("first", "last")
DETECT_FORMS = ("channels_first", "anchors_first")
BOX_FORMATS = ("cxcywh", "xyxy", "xywh", "yxyx")


@dataclass(frozen=True)
class Resize(Closed):
    """The rule that resizes an image of any size to the model's `height` x `width` pixels.

    Attributes:
        rule: "stretch" ignores the ratio of the sides. "crop" scales the shorter side to `shortest_side`, and keeps the
            middle. "letterbox" keeps the ratio, centres the image and fills the rest with `pad_value`.
        shortest_side: The shorter side for "crop"; 0 for the smallest side that covers the model's size.
        pad_value: The value of the filled pixels for "letterbox", before normalization.
        filter: The interpolation: "nearest", "bilinear" or "bicubic".
    """

    rule: str
    height: int
    width: int
    shortest_side: int = 0
    pad_value: int = 114
    filter: str = "bilinear"


@dataclass(frozen=True)
class Preprocess(Closed):
    """The rule that computes the model's input from UINT8 values: (value * scale - mean) / std.

    Attributes:
        scale: The factor of each value.
        mean: One number, or one number per channel.
        std: One number, or one number per channel.
        layout: The layout of the UINT8 tensors: "nhwc", "nchw", or "model" for `model_layout`.
        model_layout: The layout of the model's input.
        colour: The order of the model's channels.
        frame_colour: The order of the channels in the UINT8 tensors; "model" for the order in `colour`.
        resize: The rule for UINT8 tensors of any height and width; None if only the model's size is accepted.
        decode: Whether requests may also contain a JPEG or PNG file.
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
        """Whether requests may contain images of any size, for which the device needs a codec."""
        return self.decode or self.resize is not None


@dataclass(frozen=True)
class Smooth(Closed):
    """The rule that computes an answer from the last `windows` windows of a signal.

    "mean" averages the class scores over these windows, or over all windows of a shorter signal. "majority" answers the
    class that more than half of the windows have, "all" the class that every window has. Before the signal has
    `windows` windows, "majority" and "all" answer no class.
    """

    rule: str
    windows: int


@dataclass(frozen=True)
class Classify(Closed):
    """The rule that classifies.

    An answer contains a class if the class's score reaches the threshold and is above the scores of the classes in
    `none`. An answer without any class has class -1.

    Attributes:
        output: The output with class scores along its last axis.
        labels: The names of the classes; empty for no names.
        top_k: The largest number of classes in an answer, the best first.
        softmax: Whether the scores are logits, which become probabilities.
        threshold: The lowest score, as one number or one number per class; empty if every score is enough.
        none: The labels of classes that stand for "no class".
        smooth: The rule that combines several windows of a signal; None for no smoothing.
    """

    output: str
    labels: tuple[str, ...] = ()
    top_k: int = 1
    softmax: bool = True
    threshold: tuple[float, ...] = ()
    none: tuple[str, ...] = ()
    smooth: Smooth | None = None

    @property
    def added(self) -> tuple[str, str]:
        """The outputs that the daemon adds to an answer."""
        return f"{self.output}_classes", f"{self.output}_probabilities"


@dataclass(frozen=True)
class Ctc(Closed):
    """The rule that decodes text from the scores of a model that was trained with CTC.

    An answer contains the text of greedy decoding, which takes the best class of each step, merges repeats and omits
    the class `blank`.

    Attributes:
        output: The output with the class scores of each step.
        labels: The text of each class.
        blank: The index of the class without a text.
        time_axis: "first" if the output is [N, steps, classes], "last" if the output is [N, classes, steps].
        softmax: Whether the scores are logits, or logarithms of probabilities.
    """

    output: str
    labels: tuple[str, ...] = ()
    blank: int = 0
    time_axis: str = "first"
    softmax: bool = True

    @property
    def added(self) -> tuple[str, str]:
        """The outputs that the daemon adds to an answer."""
        return f"{self.output}_text", f"{self.output}_probability"


@dataclass(frozen=True)
class Detect(Closed):
    """The rule that computes boxes: keep scores of at least `score_threshold`, then apply NMS by class.

    Attributes:
        boxes: The output with A boxes per image. If `scores` is "", this output also holds the C scores of each box.
        scores: The output with C scores per box, in the form of `boxes`; "" if the scores follow each box in `boxes`.
        labels: The names of the classes; empty for no names.
        form: "channels_first" if the output is [N, 4 + C, A], "anchors_first" if the output is [N, A, 4 + C].
        objectness: Whether one more value between box and scores multiplies every score of the box.
        sigmoid: Whether the scores are logits.
        box_format: The meaning of a box's four values, such as "cxcywh": centre, width, height.
        normalized: Whether a box has values from 0 to 1, as shares of the model's input, instead of pixels.
        score_threshold: The lowest score of a box in an answer.
        iou_threshold: The overlap (IoU) above which NMS removes the box with the lower score.
        detections_max: The largest number of boxes in an answer.
    """

    boxes: str
    scores: str = ""
    labels: tuple[str, ...] = ()
    form: str = "channels_first"
    objectness: bool = False
    sigmoid: bool = False
    box_format: str = "cxcywh"
    normalized: bool = False
    score_threshold: float = 0.25
    iou_threshold: float = 0.45
    detections_max: int = 300

    added: ClassVar[tuple[str, ...]] = ("detected_boxes", "detected_scores", "detected_classes", "detected_count")

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.boxes, self.scores) if self.scores else (self.boxes,)


def check_rules(
    preprocess: Preprocess | None,
    classify: Classify | None,
    detect: Detect | None,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    ctc: Ctc | None = None,
) -> None:
    """Raise BundleError unless the rules can be applied to a model of these inputs and outputs."""
    if preprocess is not None:
        check_preprocess(preprocess, inputs)
    if classify is not None:
        check_classify(classify, outputs)
    if ctc is not None:
        check_ctc(ctc, outputs)
    if detect is not None:
        check_detect(detect, outputs)
        image = preprocess.input if preprocess is not None else inputs[0].name
        if not any(spec.name == image and len(spec.shape) == 4 for spec in inputs):
            raise BundleError(f"detection needs a model of images; input {image!r} does not have 4 axes")
    added = {name for rule in (classify, detect, ctc) if rule is not None for name in rule.added}
    if taken := sorted({spec.name for spec in outputs} & added):
        raise BundleError(f"output {taken[0]!r} has a name that post-processing adds: rename it in the model")


def image_layout(shape: Sequence[int]) -> str:
    """Return "nhwc" if `shape`, of 4 axes, can have its channels only in its last axis; else "nchw"."""
    return "nhwc" if shape[3] in CHANNELS and shape[1] not in CHANNELS else "nchw"


def height_and_width(shape: Sequence[int], layout: str = "") -> tuple[int, int]:
    """Return the height and the width in `shape`, of 4 axes; `layout` is its `image_layout` by default."""
    _, first, second, third = shape
    return (first, second) if (layout or image_layout(shape)) == "nhwc" else (second, third)


def check_preprocess(pre: Preprocess, inputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `pre` can be applied to one of `inputs`."""
    spec = spec_of("preprocessing", "input", pre.input, inputs)
    check_choice("preprocessing", "layout", pre.layout, ("model", *LAYOUTS))
    check_choice("preprocessing", "model_layout", pre.model_layout, LAYOUTS)
    check_choice("preprocessing", "colour", pre.colour, COLOURS)
    check_choice("preprocessing", "frame_colour", pre.frame_colour, ("model", *COLOURS))
    if (pre.frame_colour == "gray") != (pre.colour == "gray") and pre.frame_colour != "model":
        raise BundleError(
            "preprocessing cannot convert between gray and colour: set frame_colour like colour, or to model"
        )
    check_mean_and_std("preprocessing", pre.mean, pre.std)
    if not -1e30 < pre.scale < 1e30:
        raise BundleError("preprocessing needs a finite scale")
    swapped = pre.frame_colour not in ("model", pre.colour)
    if pre.layout != "model" or pre.model_layout != "nchw" or pre.of_images or swapped:
        _check_image_input(pre, spec)
    if pre.resize is not None:
        _check_resize(pre.resize)


def _check_image_input(pre: Preprocess, spec: TensorSpec) -> None:
    if len(spec.shape) != 4:
        raise BundleError(f"preprocessing of images needs an input of 4 axes; {pre.input!r} has {len(spec.shape)}")
    channels, height, width = (
        spec.item_shape if pre.model_layout == "nchw" else (spec.shape[3], spec.shape[1], spec.shape[2])
    )
    if pre.resize is not None and not (height in (-1, pre.resize.height) and width in (-1, pre.resize.width)):
        needed = " x ".join("any" if length == -1 else str(length) for length in (height, width))
        raise BundleError(
            f"resizing gives {pre.resize.height} x {pre.resize.width}, but input {pre.input!r} needs {needed} (height x width): change "
            "[resize] to fit"
        )
    swapped = pre.frame_colour not in ("model", pre.colour)
    if (pre.of_images and channels not in (1, 3)) or (swapped and channels != 3):
        raise BundleError(
            f"images have 1 or 3 channels, but input {pre.input!r} has {counted(channels, 'channel')} in model_layout "
            f"{pre.model_layout!r}: correct model_layout, or set neither [resize] nor decode nor frame_colour, so that apps "
            "send UINT8 tensors of the model's own shape"
        )
    if pre.of_images and channels != (1 if pre.colour == "gray" else 3):
        raise BundleError(
            f"preprocessing gives {pre.colour} images, but input {pre.input!r} needs {counted(channels, 'channel')}: set colour"
        )
    if pre.decode and pre.resize is None and -1 in (height, width):
        raise BundleError(
            f"input {pre.input!r} has an open size, and decoded images may have any size: add a table [resize]"
        )


def _check_resize(resize: Resize) -> None:
    check_choice("resizing", "rule", resize.rule, RESIZE_RULES)
    check_choice("resizing", "filter", resize.filter, RESIZE_FILTERS)
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
    spec = spec_of("classification", "output", classify.output, outputs)
    if classify.top_k < 1 or len(classify.labels) > LABELS_MAX:
        raise BundleError(f"classification needs top_k >= 1 and at most {LABELS_MAX} labels")
    classes = len(classify.labels) or spec.shape[-1]
    if len(classify.threshold) not in (0, 1, classes) or not all(-1e30 < value < 1e30 for value in classify.threshold):
        raise BundleError(
            f"classification has {len(classify.threshold)} thresholds; give one finite number, or {classes}, one per class"
        )
    if unknown := sorted(set(classify.none) - set(classify.labels)):
        raise BundleError(
            f"classification: the key none has {unknown[0][:80]!r}, which is not a label: give labels of the model only"
        )
    if (smooth := classify.smooth) is not None:
        check_choice("smoothing", "rule", smooth.rule, SMOOTH_RULES)
        if not 2 <= smooth.windows <= SMOOTH_WINDOWS_MAX:
            raise BundleError(f"smoothing has windows = {smooth.windows}; give 2 to {SMOOTH_WINDOWS_MAX}")
        if smooth.rule != "mean" and classify.top_k != 1:
            raise BundleError(f'smoothing with rule = "{smooth.rule}" decides one class: leave top_k at 1')


def check_ctc(ctc: Ctc, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `ctc` can be applied to one of `outputs`."""
    spec = spec_of("ctc", "output", ctc.output, outputs)
    check_choice("ctc", "time_axis", ctc.time_axis, TIME_AXES)
    if len(spec.shape) != 3 or spec.dtype.kind != "f":
        raise BundleError(f"ctc needs class scores [N, steps, classes]; output {spec.name!r} is {spec.form}")
    classes = spec.shape[2 if ctc.time_axis == "first" else 1]
    if not 2 <= len(ctc.labels) <= LABELS_MAX or classes not in (-1, len(ctc.labels)):
        raise BundleError(
            f"ctc has {len(ctc.labels)} labels, and output {spec.name!r} has {classes} classes: give one label per class"
        )
    if not 0 <= ctc.blank < len(ctc.labels):
        raise BundleError(f"ctc has blank = {ctc.blank}; give a class from 0 to {len(ctc.labels) - 1}")
    if any("\0" in label for label in ctc.labels):
        raise BundleError("ctc has a label with the character NUL, which ends a text: remove the character")


def check_detect(detect: Detect, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless `detect` can be applied to `outputs`."""
    shapes = {name: spec_of("detection", "output", name, outputs).shape for name in detect.outputs}
    if wrong := [name for name, shape in shapes.items() if len(shape) != 3]:
        raise BundleError(f"detection needs outputs of 3 axes; {wrong[0]!r} has {len(shapes[wrong[0]])}")
    check_choice("detection", "form", detect.form, DETECT_FORMS)
    check_choice("detection", "box_format", detect.box_format, BOX_FORMATS)
    if not (0 <= detect.score_threshold <= 1 and 0 <= detect.iou_threshold <= 1):
        raise BundleError("detection needs a score_threshold and an iou_threshold from 0 to 1")
    if not 1 <= detect.detections_max <= DETECTIONS_MAX or len(detect.labels) > LABELS_MAX:
        raise BundleError(f"detection needs detections_max of 1 to {DETECTIONS_MAX} and at most {LABELS_MAX} labels")
    values = [shapes[name][1 if detect.form == "channels_first" else 2] for name in detect.outputs]
    least = 4 if detect.scores else 5 + detect.objectness
    if values[0] != -1 and (values[0] != 4 if detect.scores else values[0] < least):
        needed = "4" if detect.scores else f"at least {least}"
        raise BundleError(
            f"output {detect.boxes!r} has {values[0]} values a box, but form {detect.form} needs {needed}: set form to the "
            "layout of the output"
        )
    if detect.scores and detect.objectness:
        raise BundleError(
            "detection reads objectness only from an output with both boxes and scores: omit objectness or scores"
        )


def spec_of(what: str, kind: str, name: str, specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the input or output with a name that a rule states. Raises BundleError if the model lacks it.

    In messages, `what` names the rule, and `kind` is "input" or "output".
    """
    for spec in specs:
        if spec.name == name:
            return spec
    there = ", ".join(repr(spec.name[:80]) for spec in specs[:NAMES_SHOWN_MAX])
    raise BundleError(f"{what} names {kind} {name[:80]!r}, which the model does not have: it has {there or 'none'}")


def check_mean_and_std(what: str, mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise BundleError unless the rule `what` can normalize values with `mean` and `std`."""
    if not mean or not std or 0.0 in std or not all(-1e30 < value < 1e30 for value in (*mean, *std)):
        raise BundleError(f"{what} needs a finite mean and std, and no std may be 0")


def check_choice(what: str, key: str, value: str, known: Sequence[str]) -> None:
    """Raise BundleError unless the `value` of the key `key` in the rule `what` is one of `known`."""
    if value not in known:
        raise BundleError(f"{what} has {key} {value[:80]!r}; known: {', '.join(known)}")
