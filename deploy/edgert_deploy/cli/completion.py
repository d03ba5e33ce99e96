"""`edgert completion`: complete commands, options, devices, groups, models and profiles in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, devices and models in SHELL; see the examples.

    \b
    Examples:
      echo 'eval "$(edgert completion bash)"' >> ~/.bashrc
      echo 'eval "$(edgert completion zsh)"' >> ~/.zshrc
      edgert completion fish > ~/.config/fish/completions/edgert.fish
    """
    root = click.get_current_context().find_root()
    completer = get_completion_class(shell)
    assert completer is not None  # click has a class for each shell above
    click.echo(completer(root.command, {}, "edgert", "_EDGERT_COMPLETE").source())
