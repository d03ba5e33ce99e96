"""Packages that a test file needs, imported by its first test: each process of pytest imports every test file."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


def needed(name: str) -> Any:
    """Return the module `name` before its import. If its package is not installed, skip the test file."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return _Later(name)


class _Later:
    """A module that is imported at the first access to one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks on all that a test file names
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
