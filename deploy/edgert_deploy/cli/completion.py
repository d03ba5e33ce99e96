"""`edgert completion`: complete commands, options, devices, groups, models and profiles in a shell."""

from __future__ import annotations

import re

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class, get_completion_class

_BREAK = re.compile(r"[:=]+")


@add_completion_class
class SelectorsInBash(BashComplete):
    """Completes selectors such as `tag:rack=3` in bash, which splits words at `:` and `=`."""

    _before = ""  # the part of the word that bash does not replace

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words = [""]
        for word in (*args, incomplete):
            joined = _BREAK.fullmatch(word) or _BREAK.fullmatch(words[-1][-1:])
            words[-1:] = [words[-1] + word] if joined else [words[-1], word]
        self._before = "".join(re.findall(r".*[:=]", words[-1]))
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value.removeprefix(self._before)}"


@add_completion_class
class StartedInZsh(ZshComplete):
    """Starts zsh's completion system if the user's .zshrc has not: without it, zsh lacks `compdef`."""

    source_template = ZshComplete.source_template.replace(
        "    compdef ", "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }\n    compdef "
    )


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, devices and models in SHELL; see the examples.

    \b
    Examples:
      echo 'eval "$(edgert completion bash)"' >> ~/.bashrc
      echo 'eval "$(edgert completion zsh)"' >> ~/.zshrc
      echo 'edgert completion fish | source' >> ~/.config/fish/config.fish
    """
    root = click.get_current_context().find_root()
    completer = get_completion_class(shell)
    assert completer is not None  # click has a class for each shell above
    click.echo(completer(root.command, {}, "edgert", "_EDGERT_COMPLETE").source())
