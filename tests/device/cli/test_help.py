"""Every command of `edgertd` has a help with an example; commands for programs are hidden and work."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from edgert.cli import COMMANDS, edgertd
from tests.support.commands import commands_of

HIDDEN = {"claim", "unclaim", "list-files"}


@pytest.mark.parametrize(
    "words", [*(words for words, _ in commands_of(edgertd)), *([name] for name in sorted(HIDDEN))], ids=" ".join
)
def test_the_help_of_every_command_has_an_example(words: list[str]) -> None:
    shown = CliRunner().invoke(edgertd, [*words, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output, words


@pytest.mark.parametrize(
    "words", [["top", "--interval", "nan"], ["bench", "--for", "nan", "."], ["activate", "m", "--trial", "NaN"]]
)
def test_nan_is_refused_as_a_duration(words: list[str]) -> None:
    shown = CliRunner().invoke(edgertd, words)
    assert (shown.exit_code, "is not a duration" in shown.output) == (2, True)


def test_commands_for_programs_are_hidden() -> None:
    shown = CliRunner().invoke(edgertd, ["--help"]).output
    listed = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()}
    assert HIDDEN & listed == set()
    context = click.Context(edgertd)
    assert {name for name in COMMANDS if getattr(edgertd.get_command(context, name), "hidden", None)} == HIDDEN
    assert set(COMMANDS) - HIDDEN <= listed


def test_an_incomplete_command_gets_the_full_name_as_a_proposal() -> None:
    assert "did you mean status?" in CliRunner().invoke(edgertd, ["stat"]).output
