"""`edgert bundle diff`: the changes between two bundles, and the bytes that a device fetches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.cli.output import emit, json_option
from edgert.printable import counted, some_of
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.quantities import difference_text, size_text
from edgert_deploy.packager.report.compare import Change, Comparison, compare

SHOWN_LETTERS_MAX = 60
NAMES_SHOWN_MAX = 8
CLASSES_SHOWN_MAX = 5
# The fields of receipts that are shown one by one.
_RECEIPT = re.compile(
    r"licence|notes|gate\..*|targets\.[^.]+\.(artifacts|left_out|warnings)(\..*)?|candidates\.[^.]+(\.(float_layers|qat|passed|packed))?"
)
_CLASS = re.compile(r"candidates\.[^.]+\.(classes|slices|buckets)\..+\.artifact")
# Other lines already show the changes of these fields.
SHOWN_APART = ("artifacts.", "files.", "release", "classify.labels", "detect.labels", "ctc.labels")


@click.command()
@click.argument("before", type=BundlePath())
@click.argument("after", type=BundlePath())
@json_option
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Show the changes between two bundles, and the bytes that a device with BEFORE fetches for AFTER.

    `edgert deploy` sends these bytes, as patches if patches are smaller. If both bundles have a receipt, the command
    also compares the builds: the accuracy gate, packed and omitted artifacts, layers in float, the classes that lost
    most. The command checks the contents but not the signatures (edgert bundle verify checks a signature). The exit
    code is 0 even if the bundles differ.

    \b
    Examples:
      edgert bundle diff digits-1.edgert digits-2.edgert
      edgert bundle diff digits-1.edgert digits-2.edgert --json | jq '.fetches'
    """
    with open_bundle(before, trusted=None) as old, open_bundle(after, trusted=None) as new:
        comparison, same = compare(old, new), old.digest == new.digest
        text = (
            "the bundles have the same content" if same else "\n".join(_lines(old.manifest, new.manifest, comparison))
        )
        emit({"same": same, **asdict(comparison)}, text, as_json)


def _lines(before: Manifest, after: Manifest, comparison: Comparison) -> Iterator[str]:
    lower = " (lower: devices accept it only if signed as a downgrade)" if after.release < before.release else ""
    same = (
        " (the same: a release is immutable, so devices that have BEFORE refuse AFTER)"
        if after.release == before.release
        else ""
    )
    yield f"release   {before.release} -> {after.release}{lower}{same}"
    sizes = f"{size_text(before.source_size_bytes)} -> {size_text(after.source_size_bytes)}"
    yield f"source    {'the same' if before.source_sha256 == after.source_sha256 else f'changed, {sizes}'}"
    yield from _labels(before, after)
    for artifact_id in dict.fromkeys(a.id for a in (*before.artifacts, *after.artifacts)):
        yield from _artifact(artifact_id, before, after)
    for change in comparison.changes:
        if not change.field.startswith((*SHOWN_APART, "source_", "tools", "golden")):
            yield f"changed   {_change_text(change)}"
    yield from _receipts(comparison.receipts)
    for fetch in comparison.fetches:
        yield (
            f"fetch     {fetch.target}: {size_text(fetch.compressed_bytes)} sent for {counted(fetch.files, 'file')} of "
            f"{size_text(fetch.size_bytes)}; the target needs {size_text(fetch.whole_bytes)} in all"
        )


def _receipts(changes: Sequence[Change]) -> Iterator[str]:
    """Yield lines about the most important changes between two builds, and the number of other changes."""
    shown = [change for change in changes if _RECEIPT.fullmatch(change.field)]
    classes = [(change, _drop(change)) for change in changes if _CLASS.fullmatch(change.field)]
    worst = sorted((pair for pair in classes if pair[1] > 0), key=lambda pair: -pair[1])[:CLASSES_SHOWN_MAX]
    for change in shown:
        yield f"receipt   {_change_text(change)}"
    for change, drop in worst:
        yield f"receipt   {change.field.removesuffix('.artifact')}: {change.before:.4f} -> {change.after:.4f} ({difference_text(-drop)})"
    if rest := len(changes) - len(shown) - len(worst):
        yield f"receipt   {counted(rest, 'other field' if shown or worst else 'field')} changed: --json names them"


def _drop(change: Change) -> float:
    """Return the loss of a class or slice; 0 if one bundle lacks the class or slice."""
    both = isinstance(change.before, (int, float)) and isinstance(change.after, (int, float))
    return change.before - change.after if both else 0.0


def _artifact(artifact_id: str, before: Manifest, after: Manifest) -> Iterator[str]:
    old, new = _find(before, artifact_id), _find(after, artifact_id)
    if old is None or new is None:
        yield f"artifact  {artifact_id}: {'new' if old is None else 'removed'}"
        return
    sizes = before.artifact_bytes(old), after.artifact_bytes(new)
    a, b = old.accuracy, new.accuracy
    same_content = _contents(before, old) == _contents(after, new)
    yield f"artifact  {artifact_id}: {'the same content' if same_content else 'changed'}"
    if sizes[0] != sizes[1]:
        yield f"          {size_text(sizes[0])} -> {size_text(sizes[1])} ({sizes[1] - sizes[0]:+,} bytes)"
    if a != b:
        same_metric = a.metric == b.metric  # the difference between values of two metrics has no meaning
        after_text = (
            f"{b.artifact:.4f} ({difference_text(b.artifact - a.artifact)})"
            if same_metric
            else f"{b.metric} {b.artifact:.4f}"
        )
        fp32 = f"FP32 {a.fp32:.4f} -> {b.fp32:.4f}"
        yield f"          {a.metric} {a.artifact:.4f} -> {after_text} on {counted(b.samples, 'sample')}, {fp32}"
    if old.precision != new.precision:
        yield f"          {old.precision} -> {new.precision}"
    tools = {name: (old.tools.get(name), new.tools.get(name)) for name in {**old.tools, **new.tools}}
    if changed := [f"{name} {x or '-'} -> {y or '-'}" for name, (x, y) in sorted(tools.items()) if x != y]:
        yield f"          {', '.join(changed)}"


def _find(manifest: Manifest, artifact_id: str) -> ArtifactEntry | None:
    return next((artifact for artifact in manifest.artifacts if artifact.id == artifact_id), None)


def _contents(manifest: Manifest, artifact: ArtifactEntry) -> list[str]:
    return [manifest.file(path).sha256 for path in artifact.files]


def _labels(before: Manifest, after: Manifest) -> Iterator[str]:
    one, other = labels_of(before), labels_of(after)
    if one == other:
        return
    gone, new = [n for n in one if n not in set(other)], [n for n in other if n not in set(one)]
    parts = [f"{len(one)} -> {len(other)}"]
    parts += [f"new: {some_of(new, NAMES_SHOWN_MAX)}"] if new else []
    parts += [f"removed: {some_of(gone, NAMES_SHOWN_MAX)}"] if gone else []
    parts += ["in another order"] if [n for n in one if n in other] != [n for n in other if n in one] else []
    yield f"labels    {'; '.join(parts)}"


def labels_of(manifest: Manifest) -> tuple[str, ...]:
    after = manifest.classify or manifest.detect or manifest.ctc
    return after.labels if after is not None else ()


def _change_text(change: Change) -> str:
    return f"{change.field}: {_value(change.before)} -> {_value(change.after)}"


def _value(value: Any) -> str:
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= SHOWN_LETTERS_MAX else f"{text[: SHOWN_LETTERS_MAX - 3]}..."
