"""Every command has an example in its help, and documented exit codes for wrong options."""

from __future__ import annotations

import pytest

from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Inventory
from tests.support.commands import Edgert


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("device", "add", "x"), 2),
        (("device", "add", "x", "host", "--local", "d"), 2),
        (("device", "add", "X", "--local", "d"), 4),
        (("device", "add", "x", "--local", "d", "--profile", "no-such"), 4),
        (("device", "add", "x", "--local", "d" * 120), 4),
        (("device", "remove", "nobody"), 4),
        (("device", "list", "nobody"), 0),
        (("status",), 4),
        (("deploy", "none.edgert", "all"), 4),
        (("bootstrap", "nobody"), 4),
        (("rollback", "echo", "nobody"), 4),
        (("deploy", "none.edgert", "gamma", "beta"), 2),
        (("infer", "echo", "--input", "none.npy", "--socket", "s"), 4),
    ],
)
def test_wrong_words_have_their_exit_codes(
    edgert: Edgert, inventory: Inventory, words: tuple[str, ...], code: int
) -> None:
    assert edgert(*words)[0] == code
    assert inventory.devices() == []


def test_help_shows_an_example_for_each_command(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["device"],
        ["device", "add"],
        ["device", "set"],
        ["keys", "remove"],
        ["bootstrap"],
        ["deploy"],
        ["status"],
        ["rollback"],
        ["infer"],
    ):
        assert main([*words, "--help"]) == 0
        assert f"edgert {' '.join(words)}" in capfd.readouterr().out.partition("Example")[2], words
