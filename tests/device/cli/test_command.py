from __future__ import annotations

import gc

import click
import pytest

from edgert.cli import edgertd
from edgert.cli.command import LazyGroup


def test_the_garbage_collector_is_on_after_the_import_of_a_command_and_after_a_failed_one() -> None:
    assert edgertd.get_command(click.Context(edgertd), "status") is not None
    assert gc.isenabled()
    group = LazyGroup(commands_by_name={"lost": ("edgert.cli.lost:lost", "")})
    with pytest.raises(ModuleNotFoundError):
        group.get_command(click.Context(group), "lost")
    assert gc.isenabled()
