"""The lines about inputs, outputs and rules of a bundle, for `edgert bundle inspect` and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgert.bundle.manifest import Manifest
from edgert.bundle.rules import Classify, Detect, Preprocess
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.state import State
from edgert.bundle.text_rules import Embed, Text
from edgert.printable import counted, some_of

LABELS_SHOWN_MAX = 12


def meaning(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each fact: tensors, state, buckets, the rules before and after the model."""
    yield from (("input", f"{spec.name} {spec.form}") for spec in manifest.inputs)
    yield from (("output", f"{spec.name} {spec.form}") for spec in manifest.outputs)
    if manifest.state:
        yield "state", _state(manifest.state, manifest.state_id)
    if manifest.buckets is not None:
        yield "buckets", manifest.buckets.form
    if manifest.preprocess is not None:
        yield from (("before", text) for text in _preprocess(manifest.preprocess))
    if (signal := manifest.sound or manifest.series) is not None:
        yield "before", f"{signal.input}: {_signal(signal)}"
    if manifest.text is not None:
        yield "before", _text(manifest.text)
    if manifest.classify is not None:
        yield "after", _classify(manifest.classify)
    if manifest.embed is not None:
        yield "after", f"{manifest.embed.output}: {_embed(manifest.embed)}"
    if manifest.detect is not None:
        yield from (("after", text) for text in _detect(manifest.detect))
    if (ctc := manifest.ctc) is not None:
        yield "after", f"{ctc.output}: text by CTC, {len(ctc.labels)} classes, blank {ctc.blank}"
    if (labelled := manifest.classify or manifest.detect or manifest.ctc) is not None:
        none = manifest.classify.none if manifest.classify is not None else ()
        listed = f"; none: {some_of(none, LABELS_SHOWN_MAX)}" if none else ""
        yield "labels", f"{some_of(labelled.labels, LABELS_SHOWN_MAX)}{listed}"


def _state(state: Sequence[State], state_id: str) -> str:
    bound = ", ".join(f"{binding.output} becomes {binding.input}" for binding in state)
    return f"{bound}; sessions continue in versions of state_id {state_id}" if state_id else bound


def _preprocess(rule: Preprocess) -> Iterator[str]:
    frames = f"UINT8 frames {rule.layout if rule.layout != 'model' else rule.model_layout}"
    if rule.frame_colour not in ("model", rule.colour):
        frames += f" {rule.frame_colour}"
    yield f"{rule.input}: takes {frames}{', JPEG and PNG files' if rule.decode else ''}"
    if (resize := rule.resize) is not None:
        how = {
            "crop": f", shorter side {resize.shortest_side or 'as needed'}",
            "letterbox": f", pad {resize.pad_value}",
        }
        yield f"{resize.rule} to {resize.height} x {resize.width}, {resize.filter}{how.get(resize.rule, '')}"
    value = f"(value * {rule.scale:g} - {list(rule.mean)}) / {list(rule.std)}"
    yield f"{value}, {rule.colour}, model {rule.model_layout}"


def _signal(rule: Sound | Series) -> str:
    every = f", every {rule.step}" if rule.step else ""
    every += f", after {rule.lead} zeros" if rule.lead else ""
    if isinstance(rule, Series):
        return f"windows of {rule.length} x {counted(rule.channels, 'channel')}{every}: {', '.join(rule.features)}"
    files = "WAV files, " if rule.decode else ""
    details = (
        "" if rule.features == "samples" else f", {rule.n_mels} mel bands, n_fft {rule.n_fft}, hop {rule.hop_length}"
    )
    return f"{files}windows of {rule.length} samples at {rule.rate_hz} Hz{every}: {rule.features}{details}"


def _text(rule: Text) -> str:
    longer = "longer ones are refused" if rule.truncation == "none" else f"cut on the {rule.truncation}"
    return (
        f"text, at most {rule.max_tokens} tokens, {longer}; becomes {', '.join(rule.inputs)}, padded with {rule.pad_id}"
    )


def _classify(rule: Classify) -> str:
    parts = [f"top {rule.top_k} of {counted(len(rule.labels), 'label')}", *(["softmax"] if rule.softmax else [])]
    if rule.threshold:
        low, high = min(rule.threshold), max(rule.threshold)
        parts.append(f"from {low:g}" + (f" to {high:g}, by label" if high > low else ""))
    if (smooth := rule.smooth) is not None:
        parts.append(f"{smooth.rule} of {counted(smooth.windows, 'window')}")
    return f"{rule.output}: {', '.join(parts)}"


def _embed(rule: Embed) -> str:
    pooled = {"mean": f"the mean over {rule.mask}", "cls": "the first token's", "none": "as it is"}[rule.pooling]
    return f"embedding, {pooled}{', of length 1' if rule.normalize else ''}"


def _detect(rule: Detect) -> Iterator[str]:
    parts = "boxes, objectness and scores" if rule.objectness else "boxes and scores"
    place = f"boxes in {rule.boxes}, scores in {rule.scores}" if rule.scores else f"{parts} in {rule.boxes}"
    form = f"{rule.form}, {rule.box_format}{', 0 to 1' if rule.normalized else ''}{', logits' if rule.sigmoid else ''}"
    yield f"{place}: {form}"
    yield (
        f"scores from {rule.score_threshold:g}, NMS at IoU {rule.iou_threshold:g} within each class, "
        f"at most {rule.detections_max}, {counted(len(rule.labels), 'label')}"
    )
