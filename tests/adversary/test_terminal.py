"""A device and a bundle put terminal escapes into all their texts, and no command prints an escape."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import new_key
from edgert.cli import main as edgertd
from edgert.log import log
from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Inventory
from hil.support.sshd import running_sshd
from tests.support.bundles import make_null_bundle
from tests.support.paths import ROOT
from tests.support.statuses import device_status

ESCAPE = "\x1b]52;c;Y3VybCBldmls\x07\x9b2J\u202e"
# The only modules that write to a terminal. All other modules call them.
WRITERS = {
    "deploy/edgert_deploy/cli/build/progress.py": "bars, and a result above them",
    "deploy/edgert_deploy/cli/completion.py": "a script for the shell, of this package's own",
    "edgert/cli/output.py": "the function",
    "edgert/cli/command.py": "error messages",
    "edgert/cli/top.py": "a screen that is redrawn",
    # The next modules run as processes whose output another module reads.
    "deploy/edgert_deploy/packager/sources/formats/converters/from_torch.py": "a child of the build",
    "deploy/edgert_deploy/packager/sources/formats/converters/from_keras.py": "a child of the build",
    "edgert/telemetry/forwarder_process.py": "a number, for the uninstallation",
}


def poisoned(value: Any) -> Any:
    """Return JSON with an escape in every text."""
    if isinstance(value, dict):
        return {key: poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    return f"{value}{ESCAPE}" if isinstance(value, str) else value


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a device that sends escapes in every answer, error and log line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    with running_sshd(tmp_path / "sshd") as server:
        program = server.home / "edgert/venv/bin/edgertd"
        program.parent.mkdir(parents=True)
        (server.home / "status.json").write_text(json.dumps(poisoned(device_status().as_json())))
        error = {"error": {"code": f"device.error{ESCAPE}", "message": ESCAPE}}
        (server.home / "error.json").write_text(json.dumps(error))
        (server.home / "raw").write_text(f"{ESCAPE}\n")
        program.write_text(
            f'#!/bin/sh\ncat {server.home}/raw >&2\ncase "$*" in *status*) exec cat {server.home}/status.json;; esac\n'
            f"cat {server.home}/error.json\nexit 7\n"
        )
        program.chmod(0o755)
        state = server.home / "edgert/state"
        state.mkdir(parents=True)
        (state / "edgertd.log").write_text(f"{ESCAPE}\n" * 3)
        Inventory(tmp_path / "conf" / "inventory.toml").add(server.device())
        yield "board"


def controls(text: str) -> set[str]:
    return {c for c in text if c in ESCAPE and not c.isprintable()}


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["status", "--check"], ["deploy", "BUNDLE", "board"], ["deploy", "BUNDLE", "board", "--dry-run"],
        ["rollback", "echo", "board"], ["logs", "board"], ["doctor", "board"], ["device", "probe", "board"],
        ["keys", "list", "board"], ["infer", "echo", "board", "--input", "x.npy"], ["bench", "echo", "board"],
        ["rollout", "list"], ["uninstall", "board", "--yes"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_messages_of_a_device_do_not_control_the_terminal_of_the_operator(
    words: list[str], hostile: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = str(make_null_bundle(tmp_path / "b", new_key()))
    capfd.readouterr()
    main([bundle if word == "BUNDLE" else word for word in words])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert controls(out + err) == set()


def test_text_of_a_bundle_does_not_control_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = str(
        make_null_bundle(
            tmp_path, new_key(), receipt={"format": 2, "candidates": [], "licence": ESCAPE, "notes": ESCAPE}
        )
    )
    for words in (["bundle", "inspect", bundle], ["bundle", "diff", bundle, bundle], ["bundle", "verify", bundle]):
        main(words)
    edgertd(["--state", str(tmp_path / ESCAPE), "status"])
    out, err = capfd.readouterr()
    assert "notes" in out
    assert controls(out + err) == set()


def test_a_log_line_cannot_be_forged(capfd: pytest.CaptureFixture[str]) -> None:
    log(f"ValueError in a request: {ESCAPE}\n2026-01-01T00:00:00Z all is well")
    err = capfd.readouterr().err
    assert (controls(err), err.count("\n")) == (set(), 1)


def writes(path: Path) -> bool:
    """Return whether the module writes to a terminal itself."""
    names = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    return bool(names & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"})


def test_all_output_goes_through_one_function() -> None:
    modules = [path for top in ("edgert", "deploy/edgert_deploy") for path in (ROOT / top).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in modules if writes(path)}
    assert found == {*WRITERS, "edgert/log.py"}
