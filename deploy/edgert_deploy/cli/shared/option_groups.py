"""Groups of options: each has a heading in `--help`, and the command gets it as one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])

_OTHERS = "Options"


def section(title: str, *options: Callable[[F], F]) -> tuple[Callable[[F], F], ...]:
    """Return the options with `title` as their heading in the help of a `SectionedCommand`."""
    return tuple(_titled(title, option) for option in options)


def gathered(name: str, cls: type[Any], *options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds the options. The command receives their values as `name`, a `cls`.

    Fields of `cls` without an option keep their defaults.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def gather(**given: Any) -> Any:
            values = {key: given.pop(key) for key in cls.__dataclass_fields__ if key in given}
            return command(**given, **{name: cls(**values)})

        wrapped: Any = gather  # functools.wraps cannot type a changed signature
        return each_of(*options)(wrapped)

    return decorate


def each_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds the options in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def given_option(*parameters: str) -> str:
    """Return the first option on the command line that sets one of `parameters`; "" for no option."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in parameters and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            return parameter.opts[0]
    return ""


class SectionedCommand(click.Command):
    """A command whose help shows its options in sections, and options without a section last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(option, "section", _OTHERS), []).append(record)
        others = sections.pop(_OTHERS)  # this section has at least --help
        for title, records in {**sections, _OTHERS: others}.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _titled(title: str, option: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        command = option(command)
        vars(command)["__click_params__"][-1].section = title  # click stores options here until it makes the command
        return command

    return decorate
