"""Every command of `edgertd` has a help with an example; commands for programs are hidden and work."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from edgert.cli import COMMANDS, edgertd

HIDDEN = {"claim", "release", "have"}


def commands(group: click.Group) -> list[tuple[list[str], click.Command]]:
    """Each command and the words that call it."""
    found: list[tuple[list[str], click.Command]] = []
    context = click.Context(group)
    for name in [*group.list_commands(context), *(sorted(HIDDEN) if group is edgertd else ())]:
        command = group.get_command(context, name)
        assert command is not None
        found.append(([name], command))
        if isinstance(command, click.Group):
            found += [([name, *words], one) for words, one in commands(command)]
    return found


@pytest.mark.parametrize("words", [words for words, _ in commands(edgertd)], ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: list[str]) -> None:
    shown = CliRunner().invoke(edgertd, [*words, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output, words


@pytest.mark.parametrize(
    "words", [["top", "--interval", "nan"], ["bench", "--for", "nan", "."], ["activate", "m", "--trial", "NaN"]]
)
def test_nan_is_not_a_duration(words: list[str]) -> None:
    shown = CliRunner().invoke(edgertd, words)
    assert (shown.exit_code, "is not a duration" in shown.output) == (2, True)


def test_commands_for_programs_are_hidden() -> None:
    shown = CliRunner().invoke(edgertd, ["--help"]).output
    listed = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()}
    assert HIDDEN & listed == set()
    assert {name for words, command in commands(edgertd) if command.hidden for name in words} == HIDDEN
    assert set(COMMANDS) - HIDDEN <= listed


def test_a_command_that_is_cut_short_is_named() -> None:
    assert "did you mean status?" in CliRunner().invoke(edgertd, ["stat"]).output
