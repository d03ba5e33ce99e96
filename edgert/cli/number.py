"""A number as an option's value."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number within limits. click's own type accepts `nan`, because no comparison with `nan` is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number
