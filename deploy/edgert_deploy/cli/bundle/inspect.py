"""`edgert bundle inspect`: the content of a bundle; `verify` checks its signature."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import ArtifactEntry
from edgert.cli.output import emit, json_option
from edgert.printable import counted
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.quantities import difference_text, share_text, size_text
from edgert_deploy.packager.report import Report, gather
from edgert_deploy.packager.report.meaning import meaning

WORST_SHOWN_MAX = 5  # the maximum number of classes or layers in one line


@click.command()
@click.argument("bundle", type=BundlePath())
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show the content of BUNDLE: inputs, outputs, targets, artifacts, accuracy, layers, tools, receipt.

    edgert bundle report shows the same content as a page with plots. edgert bundle diff compares two bundles. edgert
    bundle verify checks the signature.

    \b
    Examples:
      edgert bundle inspect digits.edgert
      edgert bundle inspect digits.edgert --json | jq '.receipt.candidates[].classes'
    """
    with open_bundle(bundle, trusted=None) as opened:
        report = gather(opened, bundle.stat().st_size)
    value = {"manifest": json.loads(report.manifest.to_bytes()), **report.as_json()}
    emit(value, "\n".join(_lines(report)), as_json)


def _lines(report: Report) -> Iterator[str]:
    manifest, receipt = report.manifest, report.receipt
    downgrade = f", a downgrade from releases up to {manifest.downgrade_from}" if manifest.downgrade_from else ""
    yield f"model     {manifest.model}, release {manifest.release}{downgrade}"
    yield f"digest    {report.digest}"
    yield f"signed    by key {', '.join(report.key_ids)} (not checked: run edgert bundle verify)"
    if manifest.expires:
        yield f"expires   {manifest.expires}: devices install it until then"
    yield f"size      {size_text(report.size_bytes)}, {counted(len(manifest.files), 'file')}"
    yield f"source    {size_text(manifest.source_size_bytes)}, SHA-256 {manifest.source_sha256}"
    yield from (f"{name:<10}{receipt[name]}" for name in ("licence", "notes") if receipt.get(name))
    yield from (f"{kind:<10}{text}" for kind, text in meaning(manifest))
    yield f"golden    {counted(report.golden_samples, 'sample')} with each artifact's answers"
    built = {entry["profile"]: entry for entry in receipt.get("targets", [])}
    for target in manifest.targets:
        machines = ", ".join(target.machines) or "any processor"
        yield f"target    {target.profile} ({machines}): {', else '.join(target.artifacts)}"
        if target.reference:
            yield f"          devices can compare live answers with {target.reference}"
        left_out = built.get(target.profile, {}).get("left_out", [])
        yield from (f"          without {entry['engine']}: {entry['reason']}" for entry in left_out)
    candidates = {entry["id"]: entry for entry in report.candidates()}
    for artifact in manifest.artifacts:
        yield from _artifact(report, artifact, candidates.get(artifact.id, {}))
    yield from _receipt(report)


def _artifact(report: Report, artifact: ArtifactEntry, candidate: Mapping[str, Any]) -> Iterator[str]:
    accuracy = artifact.accuracy
    yield f"artifact  {artifact.id}: {artifact.engine} {artifact.precision}, {report.manifest.artifact_bytes(artifact)} bytes"
    yield (
        f"          {accuracy.metric} {accuracy.fp32:.4f} -> {accuracy.artifact:.4f} on {counted(accuracy.samples, 'sample')}, "
        f"limit {accuracy.max_drop:g} ({'pass' if accuracy.passed else 'FAIL'})"
    )
    measured = candidate.get("accuracy", {})
    if measured.get("drop_low") is not None:
        low, high = -measured["drop_high"], -measured["drop_low"]
        yield f"          the change is {difference_text(low)} to {difference_text(high)} with 95 % confidence"
    if layers := report.layers.get(artifact.id):
        kinds = [f"{kind} {' + '.join(f'{n} {p}' for p, n in counts.items())}" for kind, counts in layers.items()]
        yield f"          layers: {', '.join(kinds)}"
    if (share := candidate.get("int8_share")) is not None:
        yield f"          in INT8: {share_text(share)} of the multiply-accumulates"
    if floats := candidate.get("float_layers"):
        yield f"          in float for accuracy: {', '.join(floats)}"
    lost = sorted(candidate.get("classes", []), key=lambda one: one["artifact"] - one["fp32"])[:WORST_SHOWN_MAX]
    if words := [
        f"{one['name']} {difference_text(one['artifact'] - one['fp32'])}"
        for one in lost
        if one["artifact"] < one["fp32"]
    ]:
        yield f"          classes that lost most: {', '.join(words)}"
    specs = zip(report.manifest.outputs, artifact.golden_atol, strict=False)
    yield f"          golden answers: {', '.join(f'{spec.name} within {atol:g}' for spec, atol in specs)}"
    yield f"          made with {', '.join(f'{tool} {version}' for tool, version in artifact.tools.items())}"


def _receipt(report: Report) -> Iterator[str]:
    """Yield lines about unpacked candidates, times, harmful layers and golden answers."""
    for candidate in report.candidates():
        if not candidate["packed"]:
            accuracy = candidate["accuracy"]
            yield (
                f"candidate {candidate['id']}, not packed: {size_text(candidate['size_bytes'])}, {accuracy['metric']} "
                f"{accuracy['fp32']:.4f} -> {accuracy['artifact']:.4f} ({'pass' if candidate['passed'] else 'FAIL'})"
            )
    for profile, candidate in report.times():
        time = (
            candidate["error"]
            or f"{candidate['p50_ms']:.3g} ms, p90 {candidate['p90_ms']:.3g} ms, on {counted(candidate['threads'], 'thread')}"
        )
        yield f"latency   {profile}: {candidate['id']} {time} ({candidate['where']})"
    for engine, layers in report.harms():
        yield f"harm      {engine}: {_decibels(layers[:WORST_SHOWN_MAX], 'name')}"
    if worst := report.worst_activations(WORST_SHOWN_MAX):
        yield f"8 bits    most harmful for: {_decibels(worst, 'layer')}"
    for pair in report.goldens:
        yield (
            f"golden    {pair.artifact} and {pair.other} differ by at most {pair.difference:.3g} "
            f"(a device may differ by {pair.tolerance:.3g})"
        )


def _decibels(layers: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{layer[name]} {layer['sqnr_db']:.1f} dB" for layer in layers)
