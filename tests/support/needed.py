"""Packages that a test file needs, imported by its first test: each process of pytest imports every test file."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


def needed(name: str) -> Any:
    """Return the module `name`, not imported yet; skip the test file where its package is not installed."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return _Later(name)


class _Later:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks on all that a test file names
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
