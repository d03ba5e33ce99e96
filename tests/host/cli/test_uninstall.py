"""`edgert uninstall` removes the files of bootstrap, and other files only if the user agrees."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.cli import main as edgertd
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Device, Inventory
from tests.support.commands import Edgert, live, stop
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port
from tests.support.shell import environment_of
from tests.support.terminals import Terminal

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKtJ2Zk1O1N7xVq8M2oPpN3kQ0m4b1sUq3bF0hYy9a1T"


@pytest.fixture
def state(edgert: Edgert, here: Path, tmp_path: Path) -> Path:
    """The folder of `here`, bootstrapped."""
    assert edgert("bootstrap", "here")[0] == 0
    return tmp_path / "dev"


@pytest.fixture
def second(edgert: Edgert, state: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of another device, `there`, bootstrapped."""
    assert edgert("device", "add", "there", "--local", "other")[0] == 0
    assert edgert("bootstrap", "there")[0] == 0
    yield tmp_path / "other"
    stop(tmp_path / "other")


def files_of(folder: Path) -> set[str]:
    """Return the files that do not change while a daemon runs."""
    return {name for name in ("config.toml", "keys", "models", "edgert.sock") if (folder / name).exists()}


def test_a_dry_run_lists_what_is_removed_and_what_is_kept_and_changes_nothing(
    edgert: Edgert, here: Path, state: Path
) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    before = files_of(state)
    code, answer = edgert("uninstall", "here", "--dry-run")
    (row,) = answer["devices"]
    assert (code, answer["ok"], answer["dry_run"]) == (0, True, True)
    assert str(state / "edgert.sock") in row["removed"]
    assert {str(state / name) for name in ("config.toml", "keys", "models")} <= set(row["left"])
    code, answer = edgert("uninstall", "here", "--dry-run", "--purge")
    assert str(state / "models") in answer["devices"][0]["removed"]
    assert files_of(state) == before
    assert live(edgert) == (1, "steady")


def test_models_and_keys_and_configuration_stay_and_the_models_serve_after_the_next_bootstrap(
    edgert: Edgert, here: Path, state: Path
) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    assert edgert("uninstall", "here", "--yes")[0] == 0
    assert files_of(state) == {"config.toml", "keys", "models"}
    assert edgert("bootstrap", "here")[0] == 0
    assert live(edgert) == (1, "steady")


def test_a_purge_leaves_only_files_that_edgert_did_not_create_and_names_them(
    edgert: Edgert, here: Path, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (state / "mine ü.txt").write_text("mine")
    code, answer = edgert("uninstall", "here", "--purge", "--yes")
    assert (code, [path.name for path in state.iterdir()]) == (0, ["mine ü.txt"])
    assert [left for left in answer["devices"][0]["left"] if "mine ü.txt" in left] != []
    (state / "mine ü.txt").unlink()
    assert edgert("uninstall", "here", "--purge", "--yes")[0] == 0
    assert not state.exists()
    capfd.readouterr()
    assert main(["uninstall", "here", "--purge", "--yes"]) == 0
    assert "here: nothing of EdgeRT is there" in capfd.readouterr().out


def test_the_configuration_that_stays_names_no_removed_login(
    edgert: Edgert, here: Path, state: Path, tmp_path: Path
) -> None:
    login = tmp_path / "login.json"
    login.write_text('{"auths": {"registry.example.org": {"auth": "dTpwYXNz"}}}')
    words = ("--follow", "oci://registry.example.org/plant/models", "--registry-login", login)
    code, answer = edgert("bootstrap", "here", *words)
    assert code == 0, answer
    (state / "follow").mkdir(exist_ok=True)  # the first round of a follower makes this folder
    code, answer = edgert("uninstall", "here", "--yes")
    assert (code, (state / "registry-login").exists()) == (0, False), answer
    found = read_config(StateDir(state)).follow
    assert (found.registry, found.credentials) == (words[1], "")
    assert str(state / "follow") in answer["devices"][0]["left"]


def test_the_advised_next_step_works(
    edgert: Edgert, state: Path, second: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["uninstall", "all", "--yes"]) == 0
    shown = capfd.readouterr().out
    assert f"here: removed {state}/edgertd.log\n" in shown
    assert f"there: left {second}/config.toml" in shown
    assert shown.endswith("next: edgert device remove NAME for each, or edgert bootstrap here,there to set up again\n")
    for name in ("here", "there"):
        assert edgert("device", "remove", name)[0] == 0
    assert edgert("uninstall", "here", "--yes")[0] == 4, "no device of that name"


def test_an_uninstall_reports_a_device_that_does_not_answer_and_continues_with_the_others(
    edgert: Edgert, inventory: Inventory, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inventory.add(Device("gone", "ssh", f"root@127.0.0.1:{free_port()}", "this-machine", "/s", "/h", HOST_KEY))
    capfd.readouterr()
    assert main(["uninstall", "gone,here", "--yes"]) == 6
    shown = capfd.readouterr().out
    assert "gone [device.unreachable]: " in shown
    assert shown.endswith("next: edgert device remove here, or edgert bootstrap here to set up again\n")
    assert "edgert.sock" not in files_of(state)
    code, answer = edgert("uninstall", "gone", "--yes", "--purge")
    assert (code, answer["error"]["code"]) == (6, "device.unreachable")


# --- the user agrees


@pytest.mark.parametrize("words", [(), ("--purge",)])
def test_without_a_terminal_and_without_the_option_yes_nothing_is_removed(
    edgert: Edgert, here: Path, state: Path, words: tuple[str, ...]
) -> None:
    before = files_of(state)
    code, answer = edgert("uninstall", "here", *words)
    assert (code, "give --yes, and --purge" in answer["error"]["message"]) == (2, True)
    assert files_of(state) == before
    assert edgert("uninstall", "nobody")[0] == 4


def answered(tmp_path: Path, *words: str, answers: dict[str, str]) -> int:
    """Run the command on a terminal and type an answer to each question; return its exit code."""
    env = environment_of(ROOT, EDGERT_CONFIG_DIR=str(tmp_path / "conf"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    terminal = Terminal([sys.executable, "-m", "edgert_deploy.cli", "uninstall", "here", *words], tmp_path, env)
    for question, answer in answers.items():
        terminal.read_until(lambda lines, question=question: question in " ".join(lines))  # type: ignore[misc]
        terminal.type(f"{answer}\n")
    return terminal.end()[0]


@pytest.mark.parametrize("answer", ["n", ""])
def test_without_the_agreement_of_the_user_no_file_is_removed(
    edgert: Edgert, here: Path, state: Path, tmp_path: Path, answer: str
) -> None:
    before = files_of(state)
    assert answered(tmp_path, answers={"Remove EdgeRT from here?": answer}) == 130
    assert files_of(state) == before
    assert edgert("status", "here")[0] == 0


@pytest.mark.parametrize(
    ("words", "rest", "left"),
    [
        ((), {"configuration too?": "n"}, {"config.toml", "keys"}),
        ((), {"configuration too?": "y"}, set()),
        (("--purge",), {}, set()),
    ],
)
def test_a_user_who_agrees_decides_whether_models_and_keys_are_removed(
    edgert: Edgert,
    here: Path,
    state: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    rest: dict[str, str],
    left: set[str],
) -> None:
    assert answered(tmp_path, *words, answers={"Remove EdgeRT from here?": "y", **rest}) == 0
    assert files_of(state) - {"models"} == left
    assert os.path.exists(state) == bool(left)


def test_an_uninstall_is_refused_while_another_host_deploys(edgert: Edgert, here: Path, state: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    assert edgertd(["--state", str(state), "claim", "echo", "--by", "ann@desk"]) == 0
    code, refused = edgert("uninstall", "here", "--yes")
    assert (code, refused["error"]["code"]) == (7, "device.deploy_under_way")
    assert "by ann@desk). Nothing was changed; try again when it has ended" in refused["error"]["message"]
    assert live(edgert) == (1, "steady")
