"""`edgert inspect`: what a bundle says about itself. The signature is not checked here; `verify` does that."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgert.bundle import Bundle, open_bundle
from edgert.manifest import Detect, Preprocess
from edgert.tensors import TensorSpec


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: model, targets, artifacts, accuracy, tools.

    \b
    Examples:
      edgert inspect digits.edgert
      edgert inspect digits.edgert --json | python3 -m json.tool
    """
    with open_bundle(bundle, trusted=None) as opened:
        if as_json:
            manifest = json.loads(opened.manifest.to_bytes())
            click.echo(json.dumps({"digest": opened.digest, "key_ids": opened.envelope.key_ids, "manifest": manifest}))
            return
        click.echo("\n".join(_lines(opened)))


def _lines(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    lines = [
        f"model     {manifest.model}, release {manifest.release}{', a downgrade' if manifest.downgrade else ''}",
        f"digest    {bundle.digest}",
        f"signed    by key {', '.join(bundle.envelope.key_ids)} (not checked; edgert verify does)",
        f"source    {manifest.source_size_bytes} bytes, SHA-256 {manifest.source_sha256}",
        *(f"input     {_spec(spec)}" for spec in manifest.inputs),
        *(f"output    {_spec(spec)}" for spec in manifest.outputs),
    ]
    if manifest.preprocess is not None:
        lines += _before(manifest.preprocess)
    if manifest.classify is not None:
        lines.append(f"after     top {manifest.classify.top_k} of {len(manifest.classify.labels)} labels")
    if manifest.detect is not None:
        lines += _after(manifest.detect)
    for target in manifest.targets:
        machines = ", ".join(target.machines) or "any processor"
        lines.append(f"target    {target.profile} ({machines}): {', '.join(target.artifacts)}")
    for artifact in manifest.artifacts:
        size = sum(manifest.file(path).size_bytes for path in artifact.files)
        accuracy = artifact.accuracy
        lines += [
            f"artifact  {artifact.id}: {artifact.engine} {artifact.precision}, {size} bytes",
            f"          {accuracy.metric} {accuracy.fp32:.4f} -> {accuracy.artifact:.4f} on {accuracy.samples} samples",
            f"          made with {', '.join(f'{tool} {version}' for tool, version in artifact.tools.items())}",
        ]
    return lines


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
