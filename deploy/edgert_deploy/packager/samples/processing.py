"""The user's pre- and post-processing rules: presets, TOML files and `labels.txt`, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgert.bundle.rules import (
    LABELS_MAX,
    Classify,
    Ctc,
    Detect,
    Preprocess,
    Resize,
    check_classify,
    check_ctc,
    check_detect,
    check_preprocess,
    height_and_width,
    image_layout,
)
from edgert.bundle.signal_rules import Series, Sound, check_series, check_sound
from edgert.bundle.text_rules import Embed, Text
from edgert.errors import ConfigInvalid
from edgert.printable import counted
from edgert.processing.preprocessors import InputRule
from edgert.tensors import TensorSpec
from edgert.toml_file import about, from_table, parse_toml, read_text
from edgert_deploy.packager.samples.text_rule import read_embed, read_text_rule
from edgert_deploy.packager.sources.onnx_graph.classical import PAIRS, scores_of_pairs
from edgert_deploy.packager.sources.source_model import SourceModel

FILE_BYTES_MAX = 16 * 1024**2
STATE_KEYS = ("state", "state_id")  # read by stateful_samples.py
OutputRule = Classify | Detect | Ctc | Embed
INPUT_TABLES: dict[str, type[Sound] | type[Series] | type[Text]] = {"sound": Sound, "series": Series, "text": Text}
OUTPUT_TABLES = ("classify", "detect", "ctc", "embed")
LISTS = ("mean", "std", "feature_mean", "feature_std", "threshold")  # a number may replace a list of one number
PREPROCESS_PRESETS = ("imagenet", "yolo")
POSTPROCESS_PRESETS = ("yolo",)
MASKS_MIN = 16  # an output with fewer maps is a segmentation of its own; YOLO has 32 masks
ONLY_BOXES = (
    "EdgeRT reads boxes without masks, key points and angles: if each box of your model has such values, omit "
    "--postprocess, and let your app read the outputs"
)
SUPPRESSED_VALUES = 6  # the values of a box after suppression, as of YOLOv10 and YOLO26: two corners, a score, a class
SUPPRESSED = (
    "EdgeRT reads boxes before suppression: export the model without it (Ultralytics' YOLO: end2end=False), or omit "
    "--postprocess, and let your app read the output"
)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_MARGIN = 256 / 224  # the shorter side of the image before the crop, divided by the side of the crop


def read_preprocess(path: Path, source: SourceModel) -> InputRule | None:
    """Return the rule of a preset or a file; None if the file only binds state. Raises ConfigInvalid.

    A file has a table `sound`, `series` or `text`, or the keys of `Preprocess` and a table `resize`. For an image, only
    the key `input` is required. The default of `model_layout` is "nhwc" if only the last axis can hold the channels,
    and else "nchw".
    """
    if str(path) in PREPROCESS_PRESETS:
        return _checked(str(path), _preset(str(path), source), source)
    _check_there(path, PREPROCESS_PRESETS)
    values = parse_toml(read_text(path, FILE_BYTES_MAX), str(path))
    if values and not set(values) - set(STATE_KEYS):
        return None
    values = {key: value for key, value in values.items() if key not in STATE_KEYS}
    if set(values) & set(INPUT_TABLES):
        return _of_table(path, values, source)
    spec = next((spec for spec in source.app_inputs if spec.name == values.get("input")), None)
    if spec is None:
        names = ", ".join(spec.name for spec in source.app_inputs)
        wrong = f"input = {values['input']!r} is not an input of the model" if "input" in values else "input is missing"
        raise ConfigInvalid(f"{path}: {wrong}; the model's inputs are {names}: name one of them")
    may_be_image = len(spec.shape) == 4
    if spec.datatype != "FP32" and not (may_be_image and spec.datatype in ("FP16", "UINT8", "INT8")):
        raise ConfigInvalid(
            f"{path}: input {spec.name!r} is {spec.datatype}; preprocessing produces FP32, and for images also FP16, UINT8 or INT8"
        )
    layout = values.get("model_layout", image_layout(spec.shape) if may_be_image else "nchw")
    colour = "gray" if _channels(spec, layout) == 1 else "rgb"
    values = {"model_layout": layout, "colour": colour, **_with_lists(values)}
    if isinstance(resize := values.get("resize"), dict):
        height, width = height_and_width(spec.shape, layout) if may_be_image else (-1, -1)
        values["resize"] = {"rule": "stretch", "height": height, "width": width, **resize}
    preprocess = from_table(Preprocess, values, str(path))
    return _checked(str(path), preprocess, source)


def read_postprocess(
    path: Path, source: SourceModel, labels: Path | None, before: InputRule | None = None
) -> OutputRule:
    """Return the rule of a preset, or of a file with one table of OUTPUT_TABLES. Raises ConfigInvalid.

    If `before`, the rule for the inputs, is a rule for text, the table `embed` uses this rule's mask by default.
    """
    if str(path) in POSTPROCESS_PRESETS:
        return _checked_detect(str(path), _yolo(source, () if labels is None else _labels(labels)), source)
    _check_there(path, POSTPROCESS_PRESETS)
    values = parse_toml(read_text(path, FILE_BYTES_MAX), str(path))
    if len(values) != 1 or not isinstance(next(iter(values.values())), dict) or not set(values) <= set(OUTPUT_TABLES):
        raise ConfigInvalid(f"{path} needs exactly one table: [{'], ['.join(OUTPUT_TABLES)}]")
    kind, table = next(iter(values.items()))
    if "labels" in table:
        raise ConfigInvalid(f"{path}: [{kind}] has labels: give the labels in a file, with --labels")
    if kind == "ctc":
        return _ctc(path, table, source, labels)
    if kind == "embed":
        return read_embed(path, table, source, before)
    if kind == "detect":
        detect = from_table(Detect, table, f"{path}, table [detect]")
        return _checked_detect(str(path), replace(detect, labels=() if labels is None else _labels(labels)), source)
    return _classify(path, table, source, labels)


def read_classify(path: Path, source: SourceModel) -> Classify:
    """Return the rule for a file of labels, one per line. Raises ConfigInvalid.

    The output is the first output of class scores with as many classes as labels.
    """
    labels = _labels(path)
    scores = [spec for spec in source.outputs if spec.may_be_scores]
    for spec in scores:
        if spec.shape[1] == len(labels):
            _check_ranking(str(path), spec.name, source)
            return Classify(spec.name, labels)
    offers = ", ".join(f"{spec.name} has {spec.shape[1]}" for spec in scores) or "it has no output of class scores"
    raise ConfigInvalid(
        f"{path} has {counted(len(labels), 'label')}, and no output of the model has as many classes ({offers}); give one label per class"
    )


def _check_ranking(name: str, output: str, source: SourceModel) -> None:
    """Raise ConfigInvalid if the largest value of `output` is not the answered class."""
    if output in scores_of_pairs(source.proto):
        raise ConfigInvalid(
            f"{name}: output {output!r} does not tell the class: {PAIRS}, or let your app read its label"
        )


def _of_table(path: Path, values: dict[str, Any], source: SourceModel) -> Sound | Series | Text:
    """Return the rule of a file with one table of INPUT_TABLES."""
    kind, table = next(iter(values.items()))
    if len(values) != 1 or not isinstance(table, dict):
        raise ConfigInvalid(f"{path} needs exactly one table, [sound], [series] or [text], and nothing else")
    rule_class = INPUT_TABLES[kind]
    if len(source.app_inputs) == 1:
        table = {"input": source.app_inputs[0].name, **table}
    if kind == "text":
        return read_text_rule(path, table, source)
    rule = from_table(rule_class, _with_lists(table), f"{path}, table [{kind}]")
    with about(path):
        if isinstance(rule, Sound):
            check_sound(rule, source.app_inputs)
        elif isinstance(rule, Series):
            check_series(rule, source.app_inputs)
    return rule


def _preset(name: str, source: SourceModel) -> Preprocess:
    """Return the rule of a preset: as torchvision evaluates ImageNet, or with Ultralytics' letterbox."""
    images = [
        spec
        for spec in source.inputs
        if len(spec.shape) == 4 and (spec.datatype == "FP32" or spec.name in source.scales)
    ]
    if len(images) != 1:
        raise ConfigInvalid(
            f"--preprocess {name} needs a model with one FP32 input of 4 axes, or one in INT8 with a scale; this model has "
            f"{len(images)} such inputs: give a .toml file instead"
        )
    spec = images[0]
    layout = image_layout(spec.shape)
    if (channels := _channels(spec, layout)) != 3:
        raise ConfigInvalid(
            f"--preprocess {name} is for colour images; input {spec.name!r} has {counted(channels, 'channel')}: give a .toml file instead"
        )
    height, width = height_and_width(spec.shape, layout)
    if -1 in (height, width):
        raise ConfigInvalid(
            f"--preprocess {name}: input {spec.name!r} has an open size, {list(spec.shape)}: give a .toml file that states "
            "height and width under [resize]"
        )
    resize = Resize("letterbox", height, width)
    rule = Preprocess(spec.name, 1 / 255, layout="nhwc", model_layout=layout, resize=resize, decode=True)
    if name == "imagenet":
        resize = Resize("crop", height, width, shortest_side=round(max(height, width) * IMAGENET_MARGIN))
        rule = replace(rule, mean=IMAGENET_MEAN, std=IMAGENET_STD, resize=resize)
    return _quantized(rule, source)


def _quantized(rule: Preprocess, source: SourceModel) -> Preprocess:
    """If the input is INT8, change the rule so that it quantizes its result: value / scale + zero point."""
    if rule.input not in source.scales:
        return rule
    scale, zero = source.scales[rule.input]
    std = [each * scale for each in rule.std]
    mean = tuple(mean - zero * each for mean, each in zip(rule.mean, std, strict=True))
    return replace(rule, mean=mean, std=tuple(std))


def _yolo(source: SourceModel, labels: tuple[str, ...]) -> Detect:
    """Return the rule of YOLO's output, recognized by the number of labels or by its longer axis."""
    for spec in source.outputs:
        if len(spec.shape) != 3 or spec.dtype.kind != "f":
            continue
        _, first, second = spec.shape
        for form, values, boxes in (("channels_first", first, second), ("anchors_first", second, first)):
            if labels and values in (4 + len(labels), 5 + len(labels)):
                return Detect(spec.name, labels=labels, form=form, objectness=values == 5 + len(labels))
            if not labels and 5 <= values < boxes:
                # The output of YOLOv5 and similar models has the axis of boxes first, and objectness before the scores.
                # The output of YOLOv8 and later models has the axis of boxes last, and no objectness.
                return Detect(spec.name, form=form, objectness=form == "anchors_first" and values > 5)
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in source.outputs)
    six = any(len(spec.shape) == 3 and spec.shape[2] == SUPPRESSED_VALUES for spec in source.outputs)
    raise ConfigInvalid(
        f"--postprocess yolo: no output has the form [N, 4 + C, A] or [N, A, 5 + C] (the outputs are {shapes}"
        f"{f', and --labels gives {len(labels)}' if labels else ''}): give a file with a table [detect]. {ONLY_BOXES}"
        f"{f'. If the 6 values are a box after suppression, as of YOLO26: {SUPPRESSED}' if six else ''}"
    )


def masks_of(source: SourceModel, values: int) -> TensorSpec | None:
    """Return the output with masks, if boxes of `values` values end with a factor for each of these masks.

    YOLO's segmentation has boxes `[N, 4 + C + M, A]` and M masks `[N, M, height, width]`.
    """
    images = (spec for spec in source.outputs if len(spec.shape) == 4 and spec.dtype.kind == "f")
    return next((spec for spec in images if MASKS_MIN <= min(spec.shape[1], spec.shape[3]) < values - 4), None)


def _classify(path: Path, table: dict[str, Any], source: SourceModel, labels: Path | None) -> Classify:
    """Return the rule of a table [classify]. Raises ConfigInvalid."""
    names = () if labels is None else _labels(labels)
    if "output" not in table:
        if labels is None:
            raise ConfigInvalid(f"{path}: [classify] needs output, the name of an output of the model, or --labels")
        table = {"output": read_classify(labels, source).output, **table}
    classify = replace(from_table(Classify, _with_lists(table), f"{path}, table [classify]"), labels=names)
    with about(path):
        check_classify(classify, source.outputs)
    _check_ranking(str(path), classify.output, source)
    classes = next(spec.shape for spec in source.outputs if spec.name == classify.output)[-1:]
    if classify.labels and classes not in ((-1,), (len(classify.labels),)):
        raise ConfigInvalid(
            f"{path}: output {classify.output!r} has {classes[0]} classes, and --labels gives "
            f"{counted(len(classify.labels), 'label')}: give one label for each class"
        )
    return classify


def _ctc(path: Path, table: dict[str, Any], source: SourceModel, labels: Path | None) -> Ctc:
    """Return the rule of a table [ctc]. Raises ConfigInvalid.

    Each line of `labels` is the text of a class. The blank may have no line.
    """
    if labels is None:
        raise ConfigInvalid(f"{path}: [ctc] needs --labels, a file with a line for each class: the text of the class")
    outputs = [spec for spec in source.outputs if len(spec.shape) == 3 and spec.dtype.kind == "f"]
    if len(outputs) == 1:
        table = {"output": outputs[0].name, **table}
    ctc = from_table(Ctc, table, f"{path}, table [ctc]")
    spec = next((spec for spec in outputs if spec.name == ctc.output), None)
    texts = read_text(labels, FILE_BYTES_MAX).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if spec is not None and spec.shape[2 if ctc.time_axis == "first" else 1] == len(texts) + 1:
        texts.insert(ctc.blank, "")
    ctc = replace(ctc, labels=tuple(texts))
    with about(path):
        check_ctc(ctc, source.outputs)
    return ctc


def _with_lists(table: dict[str, Any]) -> dict[str, Any]:
    return {key: [value] if key in LISTS and not isinstance(value, list) else value for key, value in table.items()}


def _channels(spec: TensorSpec, layout: str) -> int:
    if len(spec.shape) < 2:
        return 1
    return spec.shape[-1] if layout == "nhwc" else spec.shape[1]


def _labels(path: Path) -> tuple[str, ...]:
    labels = tuple(line.strip() for line in read_text(path, FILE_BYTES_MAX).rstrip().splitlines())
    if "" in labels:
        raise ConfigInvalid(
            f"{path}: line {labels.index('') + 1} is empty, and each line names a class: name the class, or remove the line"
        )
    if not 1 <= len(labels) <= LABELS_MAX:
        raise ConfigInvalid(f"{path} has {len(labels)} labels; give 1 to {LABELS_MAX}, one per line")
    return labels


def _check_there(path: Path, presets: tuple[str, ...]) -> None:
    if path.suffix != ".toml" or not path.is_file():
        raise ConfigInvalid(
            f"{path} is neither a preset nor a .toml file: give {' or '.join(presets)}, or a .toml file"
        )


def _checked(name: str, preprocess: Preprocess, source: SourceModel) -> Preprocess:
    spec = next(spec for spec in source.inputs if spec.name == preprocess.input)
    channels = _channels(spec, preprocess.model_layout)
    for key, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, channels):
            raise ConfigInvalid(f"{name}: {key} has {len(values)} numbers; give 1, or {channels}, one per channel")
    with about(name):
        check_preprocess(preprocess, source.inputs)
    return preprocess


def _checked_detect(name: str, detect: Detect, source: SourceModel) -> Detect:
    with about(name):
        check_detect(detect, source.outputs)
    scored = detect.scores or detect.boxes
    shape = next(spec.shape for spec in source.outputs if spec.name == scored)
    values = shape[1] if detect.form == "channels_first" else shape[2]
    classes = values if detect.scores else values - 4 - detect.objectness
    if values == -1 or classes == len(detect.labels):
        return detect
    if not detect.scores and (masks := masks_of(source, values)) is not None:
        raise ConfigInvalid(
            f"{name}: each box of output {scored!r} ends with values for the masks in output {masks.name!r}, not with "
            f"scores. {ONLY_BOXES}"
        )
    if detect.labels:
        raise ConfigInvalid(
            f"{name}: output {scored!r} has {classes} classes, and --labels gives "
            f"{counted(len(detect.labels), 'label')}: give one label for each class. {ONLY_BOXES}"
        )
    return detect
