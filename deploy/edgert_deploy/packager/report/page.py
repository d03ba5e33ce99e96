"""The report as one HTML page. It has no scripts, sends no requests and escapes a bundle's content."""

from __future__ import annotations

from html import escape
from pathlib import Path

from edgert import __version__
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.report import Report
from edgert_deploy.packager.report.sections import SECTIONS, signed

STYLE = Path(__file__).with_name("style.css")


def page(report: Report) -> str:
    """Return the whole document. A section without content is left out."""
    sections = [(anchor, title, body) for anchor, title, write in SECTIONS if (body := write(report))]
    links = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title, _ in sections)
    bodies = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-title"><h2 id="{anchor}-title">{escape(title)}</h2>{body}</section>'
        for anchor, title, body in sections
    )
    manifest = report.manifest
    title = escape(f"{manifest.model}, release {manifest.release}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{STYLE.read_text()}</style></head>
<body><a class="skip" href="#main">To the content</a>
<header><h1>{title}</h1><p class="soft">Content <code>{report.digest[:16]}</code>, signed by
<code>{escape(", ".join(report.key_ids))}</code> (this page does not check signatures; <code>edgert bundle verify</code> does).</p>
{_tiles(report)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>
<main id="main">{bodies}</main><footer><p>Written by edgert {escape(__version__)} from the bundle alone.</p></footer></body></html>
"""


def _tiles(report: Report) -> str:
    packed = [candidate for candidate in report.candidates() if candidate["packed"]]
    worst = max(packed, key=lambda candidate: candidate["accuracy"]["drop"])["accuracy"]
    passed = all(candidate["passed"] for candidate in packed)
    tiles = {
        "Accuracy gate": f'<span class="{"good" if passed else "bad"}">{"passed" if passed else "not passed"}</span>',
        f"Worst {worst['metric']}": f"{worst['artifact']:.4f} <span class=soft>({signed(-worst['drop'])})</span>",
        "Targets": str(len(report.manifest.targets)),
        "Artifacts": str(len(report.manifest.artifacts)),
        "Bundle": size_text(report.size_bytes),
        "Source": size_text(report.manifest.source_size_bytes),
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
    return f'<dl class="tiles">{listed}</dl>'
