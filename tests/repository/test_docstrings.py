"""Docstrings of the packages start with a short line, and describe parameters and attributes that exist."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.paths import ROOT

SUMMARY_CHARS_MAX = 100
PACKAGES = ("edgert", "deploy/edgert_deploy")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BLOCK = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*):", re.MULTILINE)


def test_the_first_line_of_each_docstring_is_short() -> None:
    lines = [(place, text.splitlines()[0]) for place, _, text in docstrings()]
    long = [f"{place}: {len(line)} characters" for place, line in lines if len(line) > SUMMARY_CHARS_MAX]
    assert long == [], f"at most {SUMMARY_CHARS_MAX}: put details below an empty line"


def test_each_described_parameter_or_attribute_exists() -> None:
    unknown = [
        f"{place}: {name}"
        for place, node, text in docstrings()
        for entries in BLOCK.findall(text)
        for entry in ENTRY.findall(entries)
        for name in entry.split(", ")
        if name not in names_of(node)
    ]
    assert unknown == []


@cache
def docstrings() -> list[tuple[str, Documented, str]]:
    """Return the place, the node and the text of each docstring."""
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, text)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Documented) and (text := ast.get_docstring(node))
    ]


def names_of(node: Documented) -> set[str]:
    """Return the parameters of a function, or the attributes of a class and the parameters of its `__init__`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {parameter.arg for parameter in ast.walk(node.args) if isinstance(parameter, ast.arg)}
    names = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            names.add(ast.unparse(each.target))
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            names |= names_of(each)
            names |= {part.attr for part in ast.walk(each) if isinstance(part, ast.Attribute)}
    return names
