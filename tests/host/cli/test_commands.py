"""Every command has an example in its help, and documented exit codes for wrong options."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edgert.bundle.signing import new_key
from edgert.cli import edgertd
from edgert.cli.command import Group, main_with_errors
from edgert.cli.output import progress
from edgert_deploy.cli import edgert, main
from edgert_deploy.cli.shared.output import say
from edgert_deploy.devices.inventory import Device, Inventory
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, commands_of, own_key
from tests.support.paths import ROOT
from tests.support.shell import EDGERT, environment_of

# A valid host key that no machine has.
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKtJ2Zk1O1N7xVq8M2oPpN3kQ0m4b1sUq3bF0hYy9a1T"
FAR = Device("far", "ssh", "root@127.0.0.1:1", "this-machine", "/s", "/h", HOST_KEY, groups=("a-group",))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("device", "add", "x"), 2),
        (("device", "add", "x", "host", "--local", "d"), 2),
        (("device", "add", "x", "--local", "d", "--sudo"), 2),
        (("device", "add", "x", "--local", ""), 2),
        (("device", "add", "x", "--local", "/dev/null"), 2),
        (("keys", "new", "--dir", ""), 2),
        (("device", "add", "X", "--local", "d"), 4),
        (("device", "add", "x", "--local", "d", "--profile", "no-such"), 4),
        (("device", "add", "x", "--local", "d" * 120), 4),
        (("device", "remove", "nobody"), 4),
        (("device", "list", "nobody"), 0),
        (("status",), 4),
        (("deploy", "none.edgert", "all"), 4),
        (("bootstrap", "nobody"), 4),
        (("bootstrap", "nobody", "--follow", "oci://registry.example.org/models", "--channel", "Stable!"), 2),
        (("rollback", "echo", "nobody"), 4),
        (("rollback", "echo", "gamma", "beta"), 2),
        (("infer", "echo", "--input", "none.npy", "--socket", "s"), 4),
    ],
)
def test_wrong_options_end_with_the_documented_exit_codes(
    edgert: Edgert, inventory: Inventory, words: tuple[str, ...], code: int
) -> None:
    assert edgert(*words)[0] == code
    assert inventory.devices() == []


@pytest.mark.parametrize(
    "words",
    [
        ("bundle", "inspect", "none.edgert"),
        ("bundle", "diff", "none.edgert", "none.edgert"),
        ("bundle", "report", "none.edgert"),
        ("bundle", "verify", "none.edgert"),
        ("bundle", "verify", "there.edgert", "--key", "none.pem"),
        ("deploy", "none.edgert", "far"),
        ("deploy", "none.edgert", "far", "--dry-run"),
        ("deploy", "there.edgert", "far", "--delta-from", "none.edgert"),
        ("bench", "none.edgert", "far"),
        ("infer", "echo", "far", "--input", "none.npy"),
        ("build", "none.toml"),
        ("build", "none.onnx"),
        ("build", "none.onnx", "--target", "this-machine", "--calibration", "s", "--holdout", "s"),
        ("bootstrap", "far", "--key", "none.pem"),
        ("bootstrap", "far", "--broker", "127.0.0.1", "--mqtt-password-file", "none"),
        ("bootstrap", "far", "--broker", "127.0.0.1", "--mqtt-ca", "none"),
        ("device", "add", "x", "root@127.0.0.1:1", "--identity", "none"),
        ("device", "probe", "root@127.0.0.1:1", "--identity", "none"),
        ("device", "probe", "far", "--profiles", "none"),
        ("device", "set", "far", "--identity", "none"),
        ("profiles", "--profiles", "none"),
        ("status", "far", "--inventory", "none.toml"),
        ("fleet", "query", "--store", "none.db"),
        ("fleet", "watch", "--broker", "127.0.0.1:1", "--username", "u", "--password-file", "none"),
        ("fleet", "watch", "--broker", "127.0.0.1:1", "--tls", "--ca", "none"),
        ("fleet", "ui", "--broker", "127.0.0.1:1", "--token-file", "none"),
        ("rollout", "resume", "none"),
    ],
    ids=" ".join,
)
def test_a_missing_file_ends_with_exit_code_4_before_a_device_is_asked(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The device is unreachable: exit code 6 would mean an attempt to connect."""
    key = own_key(tmp_path)
    make_null_bundle(tmp_path, key).rename(tmp_path / "there.edgert")
    inventory.add(FAR)
    code, answer = edgert(*words)
    assert (code, answer["error"]["code"].partition(".")[0]) == (4, "input"), answer
    assert "none" in answer["error"]["message"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words",
    [
        ("bundle", "verify", "there.edgert", "--key", "pipe.pem"),
        ("bootstrap", "far", "--key", "pipe.pem"),
        ("bootstrap", "far", "--broker", "127.0.0.1", "--mqtt-password-file", "pipe"),
        ("build", "there.edgert", "--key", "pipe"),
        ("build", "there.edgert", "--labels", "pipe"),
        ("build", "pipe.toml"),
        ("status", "far", "--inventory", "pipe.toml"),
        ("device", "set", "far", "--identity", "pipe"),
        ("fleet", "watch", "--broker", "127.0.0.1:1", "--username", "u", "--password-file", "pipe"),
        ("fleet", "watch", "--broker", "127.0.0.1:1", "--tls", "--client-cert", "pipe"),
        ("fleet", "ui", "--broker", "127.0.0.1:1", "--token-file", "pipe"),
        ("channel", "show", "stable", "--registry", "oci://127.0.0.1:1/models", "--registry-login", "pipe"),
    ],
    ids=" ".join,
)
def test_a_named_pipe_is_refused_before_it_is_opened(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Opening a named pipe waits for a program that writes to the pipe."""
    make_null_bundle(tmp_path, new_key()).rename(tmp_path / "there.edgert")
    inventory.add(FAR)
    os.mkfifo(next(word for word in words if word.startswith("pipe")))
    code, answer = edgert(*words)
    assert (code, "is a named pipe" in answer["error"]["message"]) == (4, True), answer


def test_a_key_may_be_read_from_the_pipe_of_another_command(
    edgert: Edgert, inventory: Inventory, tmp_path: Path
) -> None:
    """A shell passes a pipe for `--key <(command)`."""
    key = new_key()
    bundle = make_null_bundle(tmp_path, key)
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as file:
        file.write(key.public.pem())
        file.close()
        code, answer = edgert("bundle", "verify", str(bundle), "--key", f"/dev/fd/{reader}")
    assert (code, answer["key_id"]) == (0, key.public.key_id)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("deply", "b", "all"), "deploy"),
        (("fleet", "wach"), "watch"),
        (("keys", "nwe"), "new"),
        (("rollout", "statsu"), "status"),
        (("nothing",), None),
    ],
)
def test_a_command_that_is_nearly_right_gets_the_right_command_as_a_proposal(
    words: tuple[str, ...], near: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    shown = capfd.readouterr().err
    assert (f"did you mean {near}?" in shown) == (near is not None)
    assert "\nerror: " in shown, "as for each other error"


@pytest.mark.parametrize("words", [("--json", "status"), ("keys", "--json")])
def test_the_error_about_json_before_the_command_names_its_place(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert "give --json after the command" in json.loads(capfd.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("X",), "invalid device name"),
        (("nan",), "reads as a number"),
        (("far",), "already has a device"),
        (("a-group",), "a device and a group"),
        (("x", "--group", "far"), "a device and a group"),
        (("x", "--site", "a/b"), "site id"),
        (("x", "--tag", "=1"), "invalid tag"),
        (("x", "--profile", "none"), "no device profile"),
        (("x", "--jump", "a b"), "not an address"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_before_the_device_is_asked(
    edgert: Edgert, inventory: Inventory, words: tuple[str, ...], says: str
) -> None:
    inventory.add(FAR)
    code, answer = edgert("device", "add", words[0], "root@127.0.0.1:1", *words[1:])
    assert (code, says in answer["error"]["message"]) == (4, True), answer


@pytest.mark.parametrize("command", ["export", "record"])
def test_commands_that_run_for_months_import_no_library_that_they_do_not_use(command: str) -> None:
    program = f"import sys, edgert_deploy.cli, edgert_deploy.cli.fleet.{command}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"cryptography", "onnx", "fabric", "PIL"} & set(loaded)


def test_a_deployment_imports_no_module_of_a_bootstrap() -> None:
    program = "import sys, edgert_deploy.cli, edgert_deploy.cli.deploy; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"edgert_deploy.bootstrap.plan", "packaging", "urllib3"} & set(loaded)


@pytest.mark.parametrize("words", [words for words, _ in commands_of(edgert)], ids=" ".join)
def test_the_help_of_every_command_has_an_example(words: list[str]) -> None:
    shown = CliRunner().invoke(edgert, [*words, "--help"])
    assert shown.exit_code == 0
    assert " ".join(["edgert", *words]) in shown.output.partition("Example")[2]


def test_the_guide_names_the_commands_without_json() -> None:
    without = {
        " ".join([*program, *words])
        for program, group in (((), edgert), (("edgertd",), edgertd))
        for words, command in commands_of(group)
        if not isinstance(command, click.Group) and all("--json" not in param.opts for param in command.params)
    }
    page = " ".join((ROOT / "docs/commands.md").read_text().split())
    guide = page.partition("have no `--json`: ")[2].partition(". ")[0]
    assert set(re.findall(r"`([^`]+)`", guide)) == without


WITH_JSON = [words for words, command in commands_of(edgert) if any("--json" in each.opts for each in command.params)]


def test_with_json_a_wrong_option_of_every_command_gives_one_object(
    capfd: pytest.CaptureFixture[str], inventory: Inventory
) -> None:
    for words in WITH_JSON:
        code, answer = Edgert(capfd)(*words, "--no-such-option")  # this reads stdout as JSON
        assert (code, answer["error"]["code"]) == (2, "input.usage"), words


FREE_TEXT = {"--licence", "--notes", "--text"}
VAGUE = ("text", "integer", "float", "integer range", "float range")  # click's names for the values of an option


def test_the_help_of_each_option_shows_what_to_write() -> None:
    bare = {
        (*words, param.opts[0])
        for words, command in commands_of(edgert)
        for param in command.params
        if isinstance(param, click.Option) and not param.is_flag and param.metavar is None and param.type.name in VAGUE
    }
    assert {option for *_, option in bare} <= FREE_TEXT


def test_a_command_succeeds_with_closed_streams_and_no_file_gets_their_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # Python sets them to None after `<&- >&- 2>&-`
    assert main(["profiles"]) == 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        assert os.get_inheritable(stream.fileno()), "vendors' tools get it, too"
        stream.close()


WRONG = ("status", "nothing")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "stdout", "stderr", "code", "shown"),
    [
        (("profiles",), "/dev/full", "", 4, "error: the output could not be written: No space"),
        (("profiles", "--json"), "/dev/full", "", 4, "error: the output could not be written: No space"),
        ((*WRONG, "--json"), "/dev/full", "", 4, "error: "),
        (WRONG, "", "/dev/full", 4, ""),
        (("nothing",), "", "/dev/full", 2, ""),
        (("profiles",), "a pipe without a reader", "", 141, ""),
        (("--help",), "a pipe without a reader", "", 141, ""),
    ],
)
def test_output_that_cannot_be_written_does_not_change_the_exit_code(
    words: tuple[str, ...], stdout: str, stderr: str, code: int, shown: str, unbuffered: str, tmp_path: Path
) -> None:
    (tmp_path / "inventory.toml").touch()
    unread, pipe = os.pipe()
    os.close(unread)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, pipe)
        full = stack.enter_context(Path("/dev/full").open("wb"))
        places: dict[str, Any] = {"": subprocess.PIPE, "/dev/full": full, "a pipe without a reader": pipe}
        environment = environment_of(ROOT, EDGERT_CONFIG_DIR=str(tmp_path), PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(
            [*EDGERT, *words], stdout=places[stdout], stderr=places[stderr], env=environment, text=True, check=False
        )
    assert done.returncode == code, done.stderr
    assert (done.stderr or "").startswith(shown)
    assert (done.stderr or "").count("\n") == (1 if shown else 0)


def test_a_broken_pipe_to_a_device_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """click ends the process at every broken pipe, with exit code 1 and without a message."""

    @click.group(cls=Group)
    def group() -> None: ...

    @group.command()
    def send() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert main_with_errors(group, ["send"]) == 4
    assert capfd.readouterr().err == "error: Broken pipe\n"


def test_a_character_that_the_terminal_lacks_does_not_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))

    @click.command()
    def names() -> None:
        click.echo("Küche → 1")

    assert main_with_errors(names, []) == 0
    assert written.getvalue() == "Küche \\u2192 1\n".encode("latin-1")


def test_progress_that_cannot_be_printed_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the log of a deployment is on a full disk."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("board", "sending")
        progress("sending")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.parametrize(
    "words", [("deploy", "echo-1.edgert"), ("rollback", "echo"), ("bootstrap",), ("uninstall", "--yes")]
)
def test_commands_that_change_devices_refuse_two_names_of_one_device(
    edgert: Edgert, here: Path, inventory: Inventory, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    inventory.add(replace(inventory.device("here"), name="again"))
    monkeypatch.chdir(here)
    code, value = edgert(*words, "all")
    assert (code, "here and again are one device" in value["error"]["message"]) == (4, True)
    assert edgert("status", "all")[1]["devices"][0]["device"] == "here", "reading is harmless"
