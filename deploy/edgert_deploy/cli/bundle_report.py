"""`edgert bundle report`: what a bundle is worth, for people: a page with plots, or a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.durable import replace_file
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.options import json_option
from edgert_deploy.cli.types import BundlePath
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.report import Report, gather
from edgert_deploy.packager.report.page import page

SHOWN_MAX = 5


@click.command()
@click.argument("bundle", type=BundlePath())
@click.option("--html", type=click.Path(path_type=Path), help="Write one self-contained page to this file.")
@json_option
def report(bundle: Path, html: Path | None, as_json: bool) -> None:
    """Report on BUNDLE: accuracy by class, size, latency, activation ranges, the layers that hurt most, golden answers.

    \b
    Examples:
      edgert bundle report digits.edgert
      edgert bundle report digits.edgert --html report.html     # needs no network to be read, prints well
      edgert bundle report digits.edgert --json | jq '.receipt.candidates[].classes'
    """
    with open_bundle(bundle, trusted=None) as opened:
        found = gather(opened, bundle.stat().st_size)
    if html is not None:
        _write(html, page(found))
    if as_json:
        click.echo(json.dumps({**found.as_json(), "html": None if html is None else str(html)}))
    elif html is not None:
        click.echo(f"{html}: {size_text(html.stat().st_size)}")
    else:
        click.echo("\n".join(_lines(found)))


def _write(path: Path, text: str) -> None:
    """Beside it, then renamed: a reader never sees half a page."""
    try:
        replace_file(path, text.encode(), durable=False, shared=True)
    except OSError as error:
        raise ConfigInvalid(
            f"cannot write {path}: {error.strerror}; give --html a file in a folder that exists and has room"
        ) from error


def _lines(found: Report) -> Iterator[str]:
    manifest = found.manifest
    yield f"{manifest.model}, release {manifest.release}: {size_text(found.size_bytes)}, from {size_text(manifest.source_size_bytes)} of FP32"
    for target in manifest.targets:
        yield f"target     {target.profile}: {', else '.join(target.artifacts)}"
    for one in found.candidates():
        accuracy = one["accuracy"]
        state = "" if one["packed"] else ", not packed"
        yield (
            f"candidate  {one['id']}: {size_text(one['size_bytes'])}, {accuracy['metric']} {accuracy['fp32']:.4f} -> "
            f"{accuracy['artifact']:.4f} ({'pass' if one['passed'] else 'FAIL'}{state})"
        )
        lost = sorted(one.get("classes", []), key=lambda group: group["artifact"] - group["fp32"])[:SHOWN_MAX]
        if words := [f"{g['name']} {g['artifact'] - g['fp32']:+.4f}" for g in lost if g["artifact"] < g["fp32"]]:
            yield f"           classes that lost most: {', '.join(words)}"
        if one.get("float_layers"):
            yield f"           in float: {', '.join(one['float_layers'])}"
    for profile, one in found.times():
        said = one["error"] or f"{one['p50_ms']:.3g} ms, p90 {one['p90_ms']:.3g} ms, on {one['threads']} threads"
        yield f"latency    {profile}: {one['id']} {said} ({one['where']})"
    for engine, layers in found.harms():
        worst = ", ".join(f"{one['name']} {one['sqnr_db']:.1f} dB" for one in layers[:SHOWN_MAX])
        yield f"harm       {engine}: {worst}"
    if activations := sorted(found.receipt.get("activations", []), key=lambda one: one["sqnr_db"])[:SHOWN_MAX]:
        worst = ", ".join(f"{one['layer']} {one['sqnr_db']:.1f} dB" for one in activations)
        yield f"8 bits     lose most at: {worst}"
    for agreement in found.goldens:
        yield (
            f"golden     {agreement.artifact} and {agreement.other} differ by {agreement.difference:.3g} at most "
            f"(a device may by {agreement.tolerance:.3g})"
        )
