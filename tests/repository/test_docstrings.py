"""Docstrings of the packages begin with a line that is short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

SUMMARY_CHARS_MAX = 100
PACKAGES = ("edgert", "deploy/edgert_deploy")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_the_first_line_of_each_docstring_is_short() -> None:
    long = [f"{place}: {len(line)} characters" for place, line in summaries() if len(line) > SUMMARY_CHARS_MAX]
    assert long == [], f"at most {SUMMARY_CHARS_MAX}: put details below an empty line"


def summaries() -> Iterator[tuple[str, str]]:
    """Yield each docstring's place and first line."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]
