"""`edgert bootstrap` explains options that it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert_deploy.devices.inventory import Inventory
from hil.sshd import SshDevice
from tests.support.commands import Edgert


def test_a_setting_that_is_no_toml_says_how_it_is_quoted(edgert: Edgert, here: Path) -> None:
    code, answer = edgert("bootstrap", "here", "--set", "serving.cache_mb=0", "--set", "http.listen=127.0.0.1:80")
    assert code == 4
    assert """--set 'http.listen="127.0.0.1:80"'""" in answer["error"]["message"]


def test_no_engine_is_no_wish(edgert: Edgert, inventory: Inventory, sshd: SshDevice) -> None:
    inventory.add(sshd.device())
    code, value = edgert("bootstrap", "board", "--engines", ",")
    assert (code, "names none" in value["error"]["message"]) == (2, True)


@pytest.mark.parametrize("selector", ["board", "second", "all"])
def test_two_names_of_one_machine_are_refused(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, selector: str
) -> None:
    for name in ("board", "second"):
        inventory.add(sshd.device(name))
    code, value = edgert("bootstrap", selector, "--dry-run")
    assert (code, "--same-machine" in value["error"]["message"]) == (4, True)
    code, value = edgert("bootstrap", selector, "--dry-run", "--same-machine")
    assert "no key 'default'" in value["error"]["message"], "it went on"
