"""Options in sections of the help, and their values as one argument of the command."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.testing import CliRunner

from edgert_deploy.cli.shared.option_groups import SectionedCommand, gathered, given_option, section


@dataclass(frozen=True)
class Oven:
    degrees: int
    fan: bool


OVEN = section("Oven", click.option("--degrees", default=180, help="How hot."), click.option("--fan", is_flag=True))


@click.command(cls=SectionedCommand)
@click.argument("cake")
@click.option("--quiet", is_flag=True)
@gathered("oven", Oven, *OVEN)
def bake(cake: str, quiet: bool, oven: Oven) -> None:
    click.echo(f"{cake} {quiet} {oven}")


def test_a_section_has_its_heading_and_other_options_come_last() -> None:
    lines = CliRunner().invoke(bake, ["--help"]).output.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    oven, others = lines.index("Oven:"), lines.index("Options:")
    assert (headings, "--degrees" in lines[oven + 1], "--fan" in lines[oven + 2]) == (["Oven:", "Options:"], True, True)
    assert "--quiet" in lines[others + 1]
    assert lines[others + 2].split()[0] == "--help"


def test_the_values_of_a_group_of_options_are_one_argument() -> None:
    answer = CliRunner().invoke(bake, ["plum", "--fan", "--degrees", "200"])
    assert answer.output == f"plum False {Oven(200, True)}\n"


def test_an_option_counts_as_given_only_if_the_command_line_has_it() -> None:
    @click.command()
    @click.option("--degrees", "-d", "heat", default=180)
    @click.option("--fan", is_flag=True)
    def asked(heat: int, fan: bool) -> None:
        click.echo(f"{given_option('fan', 'heat')}.")

    def given(*words: str) -> str:
        return CliRunner().invoke(asked, words, default_map={"heat": 200}).stdout

    assert given() == ".\n"
    assert given("-d", "180") == "--degrees.\n"
    assert given("--fan", "--degrees", "1") == "--degrees.\n", "in the order of the help"
