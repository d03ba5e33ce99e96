"""A number with a unit as an option's value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgert.durations import duration_s, duration_text
from edgert.errors import ConfigInvalid


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic only in new versions of click
    """A number with a unit. A default may be a plain number."""

    def __init__(
        self, name: str, parse: Callable[[str], float], text: Callable[[float], str], least: float, most: float
    ) -> None:
        self.name = name
        self._parse = parse
        self._text = text
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = self._parse(value) if isinstance(value, str) else value
        except ConfigInvalid as error:
            self.fail(error.message, param, ctx)
        if not self._least <= number <= self._most:
            most = f" and at most {self._text(self._most)}" if self._most < float("inf") else ""
            self.fail(f"{value!r} is out of range: give at least {self._text(self._least)}{most}", param, ctx)
        return number


def Duration(least_s: float = 0.0, most_s: float = float("inf")) -> Quantity:
    """`10s`, `5m`, `2h` or `1d`, as seconds."""
    return Quantity("duration", duration_s, duration_text, least_s, most_s)
