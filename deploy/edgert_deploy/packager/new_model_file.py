"""A new model file: the settings that the model itself implies, and comments for the rest."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgert.bundle.rules import CHANNELS, Detect, height_and_width, image_layout
from edgert.errors import ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.devices.facts import LOCAL_PROFILE
from edgert_deploy.devices.profiles import list_profiles
from edgert_deploy.packager.model_file import SUFFIX
from edgert_deploy.packager.samples.processing import masks_of, read_postprocess
from edgert_deploy.packager.settings import DROP_MAX, METRICS
from edgert_deploy.packager.sources.source_model import SourceModel

TOKEN_DATATYPES = ("INT32", "INT64")
COMMENT_COLUMN = 34
# Each tuple has the sides, in pixels, of the cells in the grids of a YOLO model. Each cell has one or three anchors. In
# the output [N, steps, letters] of a text recognizer, the number of steps is not such a number of anchors.
CELL_SIDES_PX = ((8, 16, 32), (16, 32), (8, 16, 32, 64), (4, 8, 16, 32))


def name_from(path: Path) -> str:
    """Return a model's name from the name of its file: in lower case, with `-` for each invalid character."""
    name = re.sub(r"[^a-z0-9_-]+", "-", path.stem.lower()).strip("-_")
    return (name if name[:1].isalpha() else f"model-{name}".strip("-"))[:63]


def write_model_file(
    source: SourceModel, force: bool, given: Mapping[str, Any] | None = None, targets: Sequence[str] = ()
) -> Path:
    """Write the model file beside the source and return its path.

    `given` are the options with which the source was read; every build needs them again. Without `targets`, the target
    is the profile of this machine. Raises ConfigInvalid if the file exists, unless `force` is set.
    """
    path = source.path.with_suffix(SUFFIX)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(model_file_text(source, given or {}, targets or (LOCAL_PROFILE,)))
    except FileExistsError as error:
        raise ConfigInvalid(f"{path} exists already: edit it, or write a new one with --init --force") from error
    except OSError as error:
        raise ConfigInvalid(f"cannot write {path}: {error.strerror}") from error
    return path


def model_file_text(source: SourceModel, given: Mapping[str, Any], targets: Sequence[str]) -> str:
    """Return the text of the file: the keys that the model implies, and a comment for each other key."""
    folder, detector = source.path.parent, _is_detector(source)
    classes = None if detector else next((s.shape[1] for s in source.outputs if s.ranks_classes), None)
    lines = [
        f"# How to build {source.path.name}: edgert build {shlex.quote(source.path.with_suffix(SUFFIX).name)}",
        "# The keys are the options of edgert build. Paths are relative to this folder. Options on the command line override the file.",
        "",
        *(f"# input   {spec.name} {spec.form}: {_kind(spec)}" for spec in source.inputs),
        *(f"# output  {spec.name} {spec.form}{_meaning(spec, detector)}" for spec in source.outputs),
        "",
        _line("model", source.path.name),
        *(_line(key, list(value) if isinstance(value, tuple) else value) for key, value in given.items() if value),
        _line("name", name_from(source.path), "the model's name on devices"),
        _line("targets", list(targets), f"device profiles: {', '.join(p.name for p in list_profiles())}"),
        _line("release", 1, "each deployment needs a higher number; --release 2 overrides it"),
        _line("expires", "90d", "devices install the bundle until then", unset=True),
        "",
        f"# Samples: .npz or folders with arrays {_arrays(source)};",
        "# folders of images, of texts (docs/text.md), or of WAV or CSV recordings (docs/signals.md); or module:function.",
        _line("calibration", _existing_file(folder, "calibration"), "samples for the quantization: at least 10"),
        _line(
            "holdout",
            _existing_file(folder, "holdout"),
            "samples that judge the artifacts: at least 8, not used for training",
        ),
        "",
        *_processing_lines(source, detector, classes),
        "",
        "# The accuracy gate.",
        _line("metric", "map" if detector else "auto", f"{', '.join(METRICS)} or module:function", unset=True),
        _line("max_drop", DROP_MAX, "the largest drop of the metric that an artifact may have", unset=True),
        _line("max_class_drop", 0.05, "the largest drop in any class or slice", unset=True),
        _line("precision", "auto", "int8, fp16, fp32, or auto: the fastest that passes", unset=True),
        "",
        _line("licence", "", "a text for readers of the bundle's receipt", unset=True),
        _line("notes", "", "a text too, such as the origin of the data and the changes", unset=True),
    ]
    return "\n".join([*lines, ""])


def _processing_lines(source: SourceModel, detector: bool, classes: int | None) -> list[str]:
    folder = source.path.parent
    images = [spec for spec in source.inputs if _layout(spec)]
    lines = []
    if images:
        lines.append("# Processing on the device: raw frames and JPEG files to inputs, outputs to labels.")
        colour = any(3 in (spec.shape[1], spec.shape[3]) for spec in images)
        preset = "yolo" if detector or _has_masks(source) else "imagenet"
        if not colour or len(source.inputs) != 1 or source.inputs[0].datatype != "FP32":
            preset = "preprocess.toml"  # no preset fits, or the range of an INT8 input may cut the preset's values
        has_rule = (folder / "preprocess.toml").is_file()
        if has_rule:
            lines.append(_line("preprocess", "preprocess.toml", "found beside the model"))
        else:
            guess = "imagenet, yolo or a .toml file; this is a guess: compare it with your training"
            lines.append(_line("preprocess", preset, guess, unset=preset == "preprocess.toml"))
    elif any(map(_is_tokens, source.inputs)):
        unset = not (folder / "text.toml").is_file()
        lines.append(_line("preprocess", "text.toml", "turns texts into tokens (docs/text.md)", unset=unset))
    if detector:
        lines.append(_line("postprocess", "yolo", "decodes boxes, with non-maximum suppression; or a .toml file"))
    if detector or classes is not None:
        count = "" if classes is None else f"{classes} "
        unset = not (folder / "labels.txt").is_file()
        lines.append(_line("labels", "labels.txt", f"the names of the {count}classes, one per line", unset=unset))
    return lines


def _line(key: str, value: str | float | list[str], comment: str = "", *, unset: bool = False) -> str:
    if isinstance(value, list):
        text = f"[{', '.join(map(_quoted, value))}]"
    else:
        text = _quoted(value) if isinstance(value, str) else f"{value:g}"
    line = f"{'# ' if unset else ''}{key} = {text}"
    return f"{line:<{COMMENT_COLUMN}}  # {comment}" if comment else line


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _existing_file(folder: Path, name: str) -> str:
    return next((path for path in (f"{name}.npz", name, f"{name}.txt") if (folder / path).exists()), f"{name}.npz")


def _arrays(source: SourceModel) -> str:
    return ", ".join(
        f"{spec.name} [samples{''.join(f', {_length(n)}' for n in spec.item_shape)}]" for spec in source.inputs
    )


def _kind(spec: TensorSpec) -> str:
    if layout := _layout(spec):
        channels, (height, width) = spec.shape[1 if layout == "nchw" else 3], height_and_width(spec.shape)
        return f"an image, {channels} channel{'s' * (channels > 1)}, {height} x {width}, layout {layout}"
    if _is_tokens(spec):
        return f"tokens, {_length(spec.shape[1])} a sample"
    return f"features, {' x '.join(map(_length, spec.item_shape)) or 1} a sample"


def _is_tokens(spec: TensorSpec) -> bool:
    return spec.datatype in TOKEN_DATATYPES and len(spec.shape) == 2


def _length(length: int) -> str:
    return "any number" if length == -1 else str(length)


def _layout(spec: TensorSpec) -> str:
    """Return "nchw" or "nhwc" for an image, "" for anything else."""
    if len(spec.shape) != 4 or spec.datatype in TOKEN_DATATYPES:
        return ""
    return image_layout(spec.shape) if {spec.shape[1], spec.shape[3]} & {*CHANNELS} else ""


def _is_detector(source: SourceModel) -> bool:
    image = next((spec for spec in source.inputs if _layout(spec)), None)
    if image is None:
        return False
    with contextlib.suppress(ConfigInvalid):
        rule = read_postprocess(Path("yolo"), source, None)
        assert isinstance(rule, Detect)
        boxes = next(spec for spec in source.outputs if spec.name in rule.outputs)
        anchors = max(boxes.shape[1:])
        if any(
            output is not boxes and len(output.shape) == 3 and anchors in output.shape[1:] for output in source.outputs
        ):
            return False  # boxes without scores in their output are relative to anchors that are not in the model
        height, width = height_and_width(image.shape)
        cells = [sum(-(-height // side) * -(-width // side) for side in grid) for grid in CELL_SIDES_PX]
        return anchors in cells or anchors in [3 * count for count in cells]
    return False


def _has_masks(source: SourceModel) -> bool:
    return any(len(spec.shape) == 3 and masks_of(source, min(spec.shape[1:])) is not None for spec in source.outputs)


def _meaning(spec: TensorSpec, detector: bool) -> str:
    if detector:
        return ": boxes and scores" if len(spec.shape) == 3 else ""
    return f": {spec.shape[1]} classes, or {spec.shape[1]} other values" if spec.ranks_classes else ""
