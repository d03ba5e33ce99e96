"""`edgert bundle report`: a bundle as one HTML page with plots."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.cli.output import emit, json_option
from edgert.durable import os_error_as, replace_file
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.report import gather
from edgert_deploy.packager.report.page import page


@click.command()
@click.argument("bundle", type=BundlePath())
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="The page to write [default: BUNDLE with .html]."
)
@json_option
def report(bundle: Path, html: Path | None, as_json: bool) -> None:
    """Write a page on BUNDLE: accuracy by class, size, latency, ranges, harmful layers, golden answers.

    The page is one file, needs no network, and prints well. edgert bundle inspect shows the same content as text or
    JSON.

    \b
    Examples:
      edgert bundle report digits.edgert
      edgert bundle report digits.edgert --html report.html
    """
    html = html or bundle.with_suffix(".html")
    if html.exists() and html.samefile(bundle):
        raise ConfigInvalid(f"{html} is the bundle itself: give --html another file")
    with open_bundle(bundle, trusted=None) as opened:
        text = page(gather(opened, bundle.stat().st_size))
    with os_error_as(ConfigInvalid, f"cannot write {html}", "give --html a file in an existing folder with free space"):
        replace_file(html, text.encode(), mode=0o644, shared=True)
    size_bytes = html.stat().st_size
    emit({"html": str(html), "size_bytes": size_bytes}, f"{html}: {size_text(size_bytes)}", as_json)
