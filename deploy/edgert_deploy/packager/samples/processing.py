"""Pre- and post-processing rules from the user: presets, TOML files and `labels.txt`, read and checked."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from edgert.bundle.rules import (
    LABELS_MAX,
    Classify,
    Ctc,
    Detect,
    Preprocess,
    Resize,
    Smooth,
    check_classify,
    check_ctc,
    check_detect,
    check_preprocess,
)
from edgert.bundle.signal_rules import Series, Sound, check_series, check_sound
from edgert.bundle.text_rules import Embed, Text
from edgert.errors import BundleError, ConfigInvalid
from edgert.processing.preprocessors import InputRule
from edgert.tensors import TensorSpec
from edgert.toml_file import parse_toml, read_text
from edgert.typed_json import Mistyped, from_json
from edgert_deploy.packager.samples.text_rule import read_embed, read_text_rule
from edgert_deploy.packager.sources.source_model import SourceModel

FILE_BYTES_MAX = 16 * 1024**2
KEYS = tuple(field.name for field in fields(Preprocess))
STATE_KEYS = ("state", "state_id")  # read by streams.py
OutputRule = Classify | Detect | Ctc | Embed
INPUT_TABLES: dict[str, type[Sound] | type[Series] | type[Text]] = {"sound": Sound, "series": Series, "text": Text}
RESIZE_KEYS = tuple(field.name for field in fields(Resize))
DETECT_KEYS = tuple(field.name for field in fields(Detect) if field.name != "labels")
CLASSIFY_KEYS = tuple(field.name for field in fields(Classify) if field.name != "labels")
SMOOTH_KEYS = tuple(field.name for field in fields(Smooth))
CTC_KEYS = tuple(field.name for field in fields(Ctc) if field.name != "labels")
EMBED_KEYS = tuple(field.name for field in fields(Embed))
POSTPROCESS_KEYS = {"classify": CLASSIFY_KEYS, "detect": DETECT_KEYS, "ctc": CTC_KEYS, "embed": EMBED_KEYS}
PREPROCESS_PRESETS = ("imagenet", "yolo")
POSTPROCESS_PRESETS = ("yolo",)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_MARGIN = 256 / 224  # of the shorter side, before the crop


def read_preprocess(path: Path, source: SourceModel) -> InputRule | None:
    """Return the preset `path`, or the rule of a file; None where it only binds state. Raises ConfigInvalid.

    A file has a table `sound`, `series` or `text`, or else the keys of `Preprocess` and a table `resize`. Of an image's keys only
    `input` is required. The default of `model_layout` is "nhwc" where only the last axis can be the channels.
    """
    if str(path) in PREPROCESS_PRESETS:
        return _checked(str(path), _preset(str(path), source), source)
    _check_there(path, PREPROCESS_PRESETS)
    values = _toml(path, (*KEYS, *INPUT_TABLES, *STATE_KEYS))
    if set(values) and not set(values) - set(STATE_KEYS):
        return None
    values = {key: value for key, value in values.items() if key not in STATE_KEYS}
    if set(values) & set(INPUT_TABLES):
        return _of_table(path, values, source)
    spec = next((spec for spec in source.app_inputs if spec.name == values.get("input")), None)
    if spec is None:
        names = ", ".join(spec.name for spec in source.app_inputs)
        raise ConfigInvalid(
            f"{path}: input = {values.get('input')!r} is not an input of the model; its inputs: {names}"
        )
    if spec.datatype != "FP32" and not (len(spec.shape) == 4 and spec.datatype in ("FP16", "UINT8", "INT8")):
        raise ConfigInvalid(
            f"{path}: input {spec.name!r} is {spec.datatype}; preprocessing makes FP32, and of images also FP16, UINT8 or INT8"
        )
    layout = str(values.get("model_layout", _model_layout(spec)))
    preprocess = Preprocess(
        input=spec.name,
        scale=_numbers(path, "scale", values.get("scale", 1.0))[0],
        mean=_numbers(path, "mean", values.get("mean", 0.0)),
        std=_numbers(path, "std", values.get("std", 1.0)),
        layout=str(values.get("layout", "model")),
        model_layout=layout,
        colour=str(values.get("colour", "gray" if _channels(spec, layout) == 1 else "rgb")),
        frame_colour=str(values.get("frame_colour", "model")),
        resize=None if "resize" not in values else _resize(path, values["resize"], spec, layout),
        decode=_flag(path, "decode", values.get("decode", False)),
    )
    return _checked(str(path), preprocess, source)


def read_postprocess(
    path: Path, source: SourceModel, labels: Path | None, before: InputRule | None = None
) -> OutputRule:
    """Return the preset `path`, or a file with one table of POSTPROCESS_KEYS. Raises ConfigInvalid."""
    if str(path) in POSTPROCESS_PRESETS:
        return _checked_detect(str(path), _yolo(source, () if labels is None else _labels(labels)), source)
    _check_there(path, POSTPROCESS_PRESETS)
    values = _toml(path, tuple(POSTPROCESS_KEYS))
    if len(values) != 1 or not all(isinstance(table, dict) for table in values.values()):
        raise ConfigInvalid(f"{path} needs exactly one table: [{'], ['.join(POSTPROCESS_KEYS)}]")
    kind, table = next(iter(values.items()))
    _refuse_unknown(path, table, POSTPROCESS_KEYS[kind])
    if kind == "ctc":
        return _ctc(path, table, source, labels)
    if kind == "embed":
        return read_embed(path, table, source, before)
    if kind == "detect":
        return _checked_detect(str(path), _detect(path, table, () if labels is None else _labels(labels)), source)
    return _classify(path, table, source, labels)


def read_classify(path: Path, source: SourceModel) -> Classify:
    """Return labels, one per line, with the first output of class scores that they fit. Raises ConfigInvalid."""
    labels = _labels(path)
    scores = [spec for spec in source.outputs if len(spec.shape) == 2 and spec.dtype.kind == "f"]
    for spec in scores:
        if spec.shape[1] == len(labels):
            return Classify(spec.name, labels)
    found = ", ".join(f"{spec.name} has {spec.shape[1]}" for spec in scores) or "it has no output of class scores"
    raise ConfigInvalid(
        f"{path} has {len(labels)} labels, which fit no output of the model ({found}); give one label per class"
    )


def _of_table(path: Path, values: dict[str, Any], source: SourceModel) -> Sound | Series | Text:
    """Return the rule of a file with one table of INPUT_TABLES; a number may stand for a list of one."""
    kind, table = next(iter(values.items()))
    if len(values) != 1 or not isinstance(table, dict):
        raise ConfigInvalid(f"{path} needs exactly one table, [sound], [series] or [text], and nothing else")
    rule_class = INPUT_TABLES[kind]
    _refuse_unknown(path, table, tuple(field.name for field in fields(rule_class)))
    lists = ("mean", "std", "feature_mean", "feature_std")
    table = {key: [value] if key in lists and not isinstance(value, list) else value for key, value in table.items()}
    if len(source.app_inputs) == 1:
        table = {"input": source.app_inputs[0].name, **table}
    try:
        if kind == "text":
            return read_text_rule(path, table, source)
        rule = from_json(rule_class, table)
        if isinstance(rule, Sound):
            check_sound(rule, source.app_inputs)
        elif isinstance(rule, Series):
            check_series(rule, source.app_inputs)
    except Mistyped as error:
        raise ConfigInvalid(f"{path}, table [{kind}]: {error}") from error
    except BundleError as error:
        raise ConfigInvalid(f"{path}: {error.message}") from error
    return rule


def _preset(name: str, source: SourceModel) -> Preprocess:
    """Return a preset: torchvision's evaluation for ImageNet, Ultralytics' letterbox for YOLO, on camera frames."""
    images = [spec for spec in source.inputs if len(spec.shape) == 4 and spec.datatype == "FP32"]
    if len(images) != 1:
        raise ConfigInvalid(
            f"--preprocess {name} needs a model with one FP32 input of 4 axes, this one has {len(images)}: give a file"
        )
    spec = images[0]
    layout = _model_layout(spec)
    height, width = _height_and_width(spec, layout)
    if -1 in (height, width):
        raise ConfigInvalid(
            f"--preprocess {name}: input {spec.name!r} has an open size, {list(spec.shape)}: give a file that states "
            "height and width under [resize]"
        )
    if name == "yolo":
        resize = Resize("letterbox", height, width)
        return Preprocess(spec.name, 1 / 255, layout="nhwc", model_layout=layout, resize=resize, decode=True)
    resize = Resize("crop", height, width, shortest_side=round(max(height, width) * IMAGENET_MARGIN))
    return Preprocess(
        spec.name,
        1 / 255,
        IMAGENET_MEAN,
        IMAGENET_STD,
        layout="nhwc",
        model_layout=layout,
        resize=resize,
        decode=True,
    )


def _yolo(source: SourceModel, labels: tuple[str, ...]) -> Detect:
    """Return the kind of YOLO export of an output, by the number of labels if given, else by its longer axis."""
    for spec in source.outputs:
        if len(spec.shape) != 3 or spec.dtype.kind != "f":
            continue
        _, first, second = spec.shape
        for form, values, boxes in (("channels_first", first, second), ("anchors_first", second, first)):
            if labels and values in (4 + len(labels), 5 + len(labels)):
                return Detect(spec.name, labels=labels, form=form, objectness=values == 5 + len(labels))
            if not labels and 5 <= values < boxes:
                # YOLOv5 and similar models output boxes first, with objectness; those from YOLOv8 on do neither.
                return Detect(spec.name, form=form, objectness=form == "anchors_first")
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in source.outputs)
    raise ConfigInvalid(
        f"--postprocess yolo: no output has the form [N, 4 + C, A] or [N, A, 5 + C] (they are {shapes}"
        f"{f', and there are {len(labels)} labels' if labels else ''}): give a file with a table [detect]"
    )


def _detect(path: Path, table: dict[str, Any], labels: tuple[str, ...]) -> Detect:
    if "boxes" not in table:
        raise ConfigInvalid(f"{path}: [detect] needs boxes, the name of an output of the model")
    texts = {key: str(table[key]) for key in ("boxes", "scores", "form", "box_format") if key in table}
    flags = {key: _flag(path, key, table[key]) for key in ("objectness", "sigmoid", "normalised") if key in table}
    numbers = {key: _numbers(path, key, table[key])[0] for key in ("score_threshold", "iou_threshold") if key in table}
    whole = {key: _whole(path, key, table[key]) for key in ("detections_max",) if key in table}
    return Detect(labels=labels, **texts, **flags, **numbers, **whole)  # type: ignore[arg-type]


def _classify(path: Path, table: dict[str, Any], source: SourceModel, labels: Path | None) -> Classify:
    """Return the rule of a table [classify]; a number may stand for a list of one threshold."""
    names = () if labels is None else _labels(labels)
    if "output" not in table:
        if labels is None:
            raise ConfigInvalid(f"{path}: [classify] needs output, the name of an output of the model, or --labels")
        table = {"output": read_classify(labels, source).output, **table}
    if "threshold" in table and not isinstance(table["threshold"], list):
        table = {**table, "threshold": [table["threshold"]]}
    try:
        classify = replace(from_json(Classify, table), labels=names)
        _refuse_unknown(path, table.get("smooth", {}), SMOOTH_KEYS)
        check_classify(classify, source.outputs)
    except Mistyped as error:
        raise ConfigInvalid(f"{path}, table [classify]: {error}") from error
    except BundleError as error:
        raise ConfigInvalid(f"{path}: {error.message}") from error
    classes = next(spec.shape for spec in source.outputs if spec.name == classify.output)[-1:]
    if classify.labels and classes not in ((-1,), (len(classify.labels),)):
        raise ConfigInvalid(
            f"{path}: output {classify.output!r} has {classes[0]} classes, and there are {len(classify.labels)} labels"
        )
    return classify


def _ctc(path: Path, table: dict[str, Any], source: SourceModel, labels: Path | None) -> Ctc:
    """Return the rule of a table [ctc], with the line of `labels` for each class; the blank may have none."""
    if labels is None:
        raise ConfigInvalid(
            f"{path}: [ctc] needs --labels, a file with a line for each class: the text that it stands for"
        )
    outputs = [spec for spec in source.outputs if len(spec.shape) == 3 and spec.dtype.kind == "f"]
    if len(outputs) == 1:
        table = {"output": outputs[0].name, **table}
    try:
        ctc = from_json(Ctc, table)
        spec = next((spec for spec in outputs if spec.name == ctc.output), None)
        texts = read_text(labels, FILE_BYTES_MAX).replace("\r\n", "\n").removesuffix("\n").split("\n")
        if spec is not None and spec.shape[2 if ctc.time_axis == "first" else 1] == len(texts) + 1:
            texts.insert(ctc.blank, "")
        ctc = replace(ctc, labels=tuple(texts))
        check_ctc(ctc, source.outputs)
    except Mistyped as error:
        raise ConfigInvalid(f"{path}, table [ctc]: {error}") from error
    except BundleError as error:
        raise ConfigInvalid(f"{path}: {error.message}") from error
    return ctc


def _resize(path: Path, table: Any, spec: TensorSpec, layout: str) -> Resize:
    if not isinstance(table, dict):
        raise ConfigInvalid(f"{path}: resize should be a table, [resize]")
    _refuse_unknown(path, table, RESIZE_KEYS)
    height, width = _height_and_width(spec, layout)
    return Resize(
        rule=str(table.get("rule", "stretch")),
        height=_whole(path, "height", table.get("height", height)),
        width=_whole(path, "width", table.get("width", width)),
        shortest_side=_whole(path, "shortest_side", table.get("shortest_side", 0)),
        pad_value=_whole(path, "pad_value", table.get("pad_value", 114)),
        filter=str(table.get("filter", "bilinear")),
    )


def _model_layout(spec: TensorSpec) -> str:
    only_last = len(spec.shape) == 4 and spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    return "nhwc" if only_last else "nchw"


def _height_and_width(spec: TensorSpec, layout: str) -> tuple[int, int]:
    if len(spec.shape) != 4:
        return -1, -1
    return (spec.shape[1], spec.shape[2]) if layout == "nhwc" else (spec.shape[2], spec.shape[3])


def _channels(spec: TensorSpec, layout: str) -> int:
    if len(spec.shape) < 2:
        return 1
    return spec.shape[-1] if layout == "nhwc" else spec.shape[1]


def _labels(path: Path) -> tuple[str, ...]:
    labels = tuple(line.strip() for line in read_text(path, FILE_BYTES_MAX).splitlines() if line.strip())
    if not 1 <= len(labels) <= LABELS_MAX:
        raise ConfigInvalid(f"{path} has {len(labels)} labels; give 1 to {LABELS_MAX}, one per line")
    return labels


def _toml(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    values = parse_toml(read_text(path, FILE_BYTES_MAX), str(path))
    _refuse_unknown(path, values, keys)
    return values


def _refuse_unknown(path: Path, values: dict[str, Any], keys: tuple[str, ...]) -> None:
    if unknown := sorted(set(values) - set(keys)):
        raise ConfigInvalid(f"{path} has unknown keys {', '.join(unknown)}; known: {', '.join(keys)}")


def _check_there(path: Path, presets: tuple[str, ...]) -> None:
    if not path.exists():
        raise ConfigInvalid(f"{path} is neither a file nor a preset: give a TOML file, or {' or '.join(presets)}")


def _numbers(path: Path, key: str, value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    ):
        raise ConfigInvalid(f"{path}: {key} = {value!r} should be a number, or a list with one per channel")
    return tuple(float(v) for v in values)


def _whole(path: Path, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigInvalid(f"{path}: {key} = {value!r} should be an integer")
    return value


def _flag(path: Path, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigInvalid(f"{path}: {key} = {value!r} should be true or false")
    return value


def _checked(name: str, preprocess: Preprocess, source: SourceModel) -> Preprocess:
    spec = next(spec for spec in source.inputs if spec.name == preprocess.input)
    if preprocess.layout == "nhwc" and len(spec.shape) != 4:
        raise ConfigInvalid(f'{name}: layout = "nhwc" needs an input of four axes; {spec.name!r} has {len(spec.shape)}')
    channels = _channels(spec, preprocess.model_layout)
    for key, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, channels):
            raise ConfigInvalid(f"{name}: {key} has {len(values)} numbers; give 1, or {channels}, one per channel")
    if 0.0 in preprocess.std:
        raise ConfigInvalid(f"{name}: std has a 0, by which values are divided; give other numbers")
    try:
        check_preprocess(preprocess, source.inputs)
    except BundleError as error:
        raise ConfigInvalid(f"{name}: {error.message}") from error
    return preprocess


def _checked_detect(name: str, detect: Detect, source: SourceModel) -> Detect:
    try:
        check_detect(detect, source.outputs)
    except BundleError as error:
        raise ConfigInvalid(f"{name}: {error.message}") from error
    held = detect.scores or detect.boxes
    shape = next(spec.shape for spec in source.outputs if spec.name == held)
    values = shape[1 if detect.form == "channels_first" else 2]
    classes = values if detect.scores else values - 4 - detect.objectness
    if detect.labels and values != -1 and classes != len(detect.labels):
        raise ConfigInvalid(f"{name}: output {held!r} has {classes} classes, and there are {len(detect.labels)} labels")
    return detect
