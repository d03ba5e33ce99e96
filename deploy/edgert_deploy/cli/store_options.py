"""What the commands that use the store share: where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

STORE_DEFAULT = "fleet.db"

F = TypeVar("F", bound=Callable[..., Any])


def store_option(command: F) -> F:
    """--store URL, given as `store_url`."""
    return click.option(
        "--store",
        "store_url",
        metavar="URL",
        envvar="EDGERT_STORE",
        default=STORE_DEFAULT,
        help=f"A file, sqlite:///FILE or postgresql://USER@HOST/DATABASE, its password in ~/.pgpass "
        f"[default: $EDGERT_STORE, else ./{STORE_DEFAULT}].",
    )(command)
