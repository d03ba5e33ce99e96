"""`edgert bundle inspect`: what a bundle says about itself. The signature is not checked here; `verify` does that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.bundle.rules import Detect, Preprocess
from edgert.tensors import TensorSpec
from edgert_deploy.cli.options import json_option
from edgert_deploy.cli.types import BundlePath
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.report import Report, gather

Layers = dict[str, dict[str, int]]
LABELS_SHOWN_MAX = 12


@click.command()
@click.argument("bundle", type=BundlePath())
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: model, meaning of inputs and outputs, targets, artifacts, accuracy, layers, tools.

    edgert bundle report draws the same and more; edgert bundle diff compares two bundles; edgert bundle verify checks the signature.

    \b
    Examples:
      edgert bundle inspect digits.edgert
      edgert bundle inspect digits.edgert --json | python3 -m json.tool
    """
    with open_bundle(bundle, trusted=None) as opened:
        found = gather(opened, bundle.stat().st_size)
        if as_json:
            click.echo(json.dumps({"manifest": json.loads(opened.manifest.to_bytes()), **found.as_json()}))
            return
        click.echo("\n".join(_lines(found)))


def _lines(found: Report) -> list[str]:
    manifest, receipt = found.manifest, found.receipt
    lines = [
        f"model     {manifest.model}, release {manifest.release}{', a downgrade' if manifest.downgrade else ''}",
        f"digest    {found.digest}",
        f"signed    by key {', '.join(found.key_ids)} (not checked; edgert bundle verify does)",
        *([f"expires   {manifest.expires}: devices install it until then"] if manifest.expires else []),
        f"size      {size_text(found.size_bytes)}, {len(manifest.files)} files",
        f"source    {size_text(manifest.source_size_bytes)}, SHA-256 {manifest.source_sha256}",
        *(f"{name:<10}{receipt[name]}" for name in ("licence", "notes") if receipt.get(name)),
        *(f"input     {_spec(spec)}" for spec in manifest.inputs),
        *(f"output    {_spec(spec)}" for spec in manifest.outputs),
    ]
    if manifest.preprocess is not None:
        lines += _before(manifest.preprocess)
    if manifest.classify is not None:
        classify = manifest.classify
        softmax = ", softmax" if classify.softmax else ""
        lines.append(f"after     {classify.output}: top {classify.top_k} of {len(classify.labels)} labels{softmax}")
        lines.append(f"labels    {_first(classify.labels)}")
    if manifest.detect is not None:
        lines += _after(manifest.detect)
        lines.append(f"labels    {_first(manifest.detect.labels)}")
    lines.append(f"golden    {found.golden_samples} samples with each artifact's answers")
    said = {one["profile"]: one for one in receipt.get("targets", [])}
    for target in manifest.targets:
        machines = ", ".join(target.machines) or "any processor"
        lines.append(f"target    {target.profile} ({machines}): {', else '.join(target.artifacts)}")
        if target.reference:
            lines.append(f"          live answers may be compared with {target.reference}")
        left_out = said.get(target.profile, {}).get("left_out", [])
        lines += [f"          without {one['engine']}: {one['reason']}" for one in left_out]
    floats = {one["id"]: one.get("float_layers", []) for one in found.candidates() if one["packed"]}
    for artifact in manifest.artifacts:
        lines += _artifact(manifest, artifact, found.layers.get(artifact.id, {}), floats.get(artifact.id, []))
    return lines


def _artifact(manifest: Manifest, artifact: ArtifactEntry, layers: Layers, floats: Sequence[str]) -> list[str]:
    size = sum(manifest.file(path).size_bytes for path in artifact.files)
    accuracy = artifact.accuracy
    lines = [
        f"artifact  {artifact.id}: {artifact.engine} {artifact.precision}, {size} bytes",
        f"          {accuracy.metric} {accuracy.fp32:.4f} -> {accuracy.artifact:.4f} on {accuracy.samples} samples, "
        f"at most {accuracy.max_drop:g} may be lost",
    ]
    if layers:
        kinds = [f"{kind} {_counts(by_precision)}" for kind, by_precision in layers.items()]
        lines.append(f"          layers: {', '.join(kinds)}")
    if floats:
        lines.append(f"          in float for accuracy: {', '.join(floats)}")
    tolerances = ", ".join(
        f"{spec.name} within {atol:g}" for spec, atol in zip(manifest.outputs, artifact.golden_atol, strict=False)
    )
    lines.append(f"          golden answers: {tolerances}")
    lines.append(f"          made with {', '.join(f'{tool} {version}' for tool, version in artifact.tools.items())}")
    return lines


def _counts(by_precision: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {precision}" for precision, count in by_precision.items())


def _first(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:LABELS_SHOWN_MAX])
    return shown + (f" and {len(labels) - LABELS_SHOWN_MAX} more" if len(labels) > LABELS_SHOWN_MAX else "")


def _before(pre: Preprocess) -> list[str]:
    frames = f"UINT8 frames {pre.layout if pre.layout != 'model' else pre.model_layout}"
    if pre.frame_colour not in ("model", pre.colour):
        frames += f" {pre.frame_colour}"
    lines = [f"before    {pre.input}: takes {frames}{', JPEG and PNG files' if pre.decode else ''}"]
    if (resize := pre.resize) is not None:
        how = {
            "crop": f", shorter side {resize.shortest_side or 'as needed'}",
            "letterbox": f", pad {resize.pad_value}",
        }
        lines.append(
            f"          {resize.rule} to {resize.height} x {resize.width}, {resize.filter}{how.get(resize.rule, '')}"
        )
    value = f"(value * {pre.scale:g} - {list(pre.mean)}) / {list(pre.std)}"
    return [*lines, f"          {value}, {pre.colour}, model {pre.model_layout}"]


def _after(detect: Detect) -> list[str]:
    parts = "boxes, objectness and scores" if detect.objectness else "boxes and scores"
    held = f"boxes in {detect.boxes}, scores in {detect.scores}" if detect.scores else f"{parts} in {detect.boxes}"
    return [
        f"after     {held}: {detect.form}, {detect.box_format}{', 0 to 1' if detect.normalised else ''}"
        f"{', logits' if detect.sigmoid else ''}",
        f"          scores from {detect.score_threshold:g}, NMS at IoU {detect.iou_threshold:g} within each class, "
        f"at most {detect.detections_max}, {len(detect.labels)} labels",
    ]


def _spec(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} [{', '.join('N' if n == -1 else str(n) for n in spec.shape)}]"
