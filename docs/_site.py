"""Hooks of the documentation site: pages from outside docs/, and tables from the JSON Schemas and the errors.

A link to another file of the repository becomes a link to its page, or plain code where it has none.
A paragraph that is only a link to a JSON Schema becomes the table of its fields, and a paragraph that is only a link to
edgert/errors.py becomes the table of the error codes. The command reference is made from click; a hook repairs its
examples and defaults.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# page: the file of the repository that it is made from
PAGES_OUTSIDE = {
    "index.md": "README.md",
    **{
        path: path
        for path in (
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "bench/README.md",
            "bench/serving.md",
            "bench/peers.md",
            "bench/trained-models.md",
            "bench/build-and-deploy.md",
            "bench/fleet.md",
            "hil/README.md",
            "examples/telemetry/README.md",
        )
    },
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
# A paragraph of a command's help whose indented lines are to stay lines.
INDENTED = re.compile(r"<p>([^<\n]+:)\n((?:  [^\n]*\n?)+?)</p>")
NO_DEFAULT = re.compile(r"<td><code>(?:Sentinel\.UNSET|None|)</code></td>")
SCHEMA = re.compile(r"^\[[^\]]*\]\((?P<target>\S+/schemas/\w+\.json)\)$", re.MULTILINE)
ERRORS = re.compile(r"^\[[^\]]*\]\(\S+/edgert/errors\.py\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are kept outside docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES_OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Include the schemas and the errors, and make links fit the site's tree."""
    folder = _source(page.file.src_uri).parent
    markdown = SCHEMA.sub(lambda found: fields_table(folder / found["target"]), markdown)
    markdown = ERRORS.sub(lambda _: errors_table(), markdown)
    return LINK.sub(lambda found: _link(found, folder, page, files), markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the lines of examples in the command reference, and show no default where there is none."""
    if not page.file.src_uri.startswith("reference/edgert"):
        return html
    html = INDENTED.sub(lambda found: f"<p>{found[1]}</p>\n<pre><code>{dedent(found[2])}</code></pre>", html)
    return NO_DEFAULT.sub("<td></td>", html)


def fields_table(schema_file: Path) -> str:
    """Return the fields of a schema as a Markdown table: name, unit, meaning."""
    schema = json.loads(schema_file.read_text())
    named = [(name, field) for name, field in schema["properties"].items()]
    patterns = [(pattern.strip("^$").replace("_", "{model}_", 1), field) for pattern, field in schema.get("patternProperties", {}).items()]  # fmt: skip
    rows = [
        f"| `{name}` | {field.get('$comment', '').removeprefix('unit: ')} | {_meaning(field)} |"
        for name, field in named + patterns
    ]
    return "\n".join(["| field | unit | meaning |", "|---|---|---|", *rows])


def errors_table() -> str:
    """Return the classes of errors as a Markdown table: code, exit code, meaning."""
    from edgert import errors

    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.EdgeRTError)]
    rows = [
        f"| `{one.code}` | {one.exit_code} | {'yes' if one.retryable else ''} | {' '.join((one.__doc__ or '').split())} |"
        for one in classes
        if one is not errors.EdgeRTError
    ]
    return "\n".join(["| code | exit code | try again | meaning |", "|---|---|---|---|", *rows])


def _meaning(field: dict[str, Any]) -> str:
    constant = f" Always `{field['const']}`." if "const" in field else ""
    return str(field["description"]).replace("|", "\\|") + constant


def _source(page: str) -> Path:
    return ROOT / PAGES_OUTSIDE.get(page, f"docs/{page}")


def _link(found: re.Match[str], folder: Path, page: Page, files: Files) -> str:
    path, _, anchor = found["target"].partition("#")
    if "://" in path or path.startswith("mailto:") or not path:
        return found[0]
    file = (folder / path).resolve()
    for target in (str(file.relative_to(ROOT)), os.path.relpath(file, ROOT / "docs")):
        target = next((page for page, source in PAGES_OUTSIDE.items() if source == target), target)
        if files.get_file_from_path(target) is not None:
            there = os.path.relpath(target, os.path.dirname(page.file.src_uri) or ".")
            return f"{found['image']}[{found['text']}]({there}{'#' if anchor else ''}{anchor})"
    return found["text"] if file.exists() else found[0]  # mkdocs warns of what does not exist
