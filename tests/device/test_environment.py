"""The commands that make an environment, as text. tests/end_to_end runs the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from httptools.parser import parser as a_library

from edgert.environment import (
    CODE,
    Environment,
    Installed,
    RuntimeOutcome,
    RuntimeResult,
    changed_wheels,
    code_digest,
    make_environment,
    package_of,
    release_in_use,
    self_test,
    trial_command,
)
from edgert.errors import DeviceError, EngineMissing
from edgert_deploy.devices.transports import Result
from tests.support.devices import wait_until
from tests.support.runtime_homes import FIRST, PYTHON, stand_in_home

NEW = "2" * 16
PINS = {"edgert-1-py3-none-any.whl": "1", "numpy-2-py3-none-any.whl": "2"}


def run(argv: Sequence[str], timeout_s: float) -> Result:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    return Result(tuple(argv), done.returncode, done.stdout, done.stderr)


def environment(home: Path, python: str, *, exactly: bool = False) -> Environment:
    """Copy the runtime in use and replace its Python by a script."""
    stand_in_home(home)
    (home / "venvs" / FIRST / "bin/python").write_text(f"#!/bin/sh\n{python}\n")
    base = {"edgert-0-py3-none-any.whl": "0", "gone-1-py3-none-any.whl": "9"}
    engines = ("null", "tflite")
    return Environment("d", str(home), NEW, f"python{PYTHON}", engines, PINS, Installed(FIRST, wheels=base), exactly)


def test_only_new_wheels_are_installed_and_edgert_is_always_installed_again() -> None:
    assert changed_wheels(PINS, {}) == tuple(PINS)
    assert changed_wheels(PINS, PINS) == ("edgert-1-py3-none-any.whl",)
    assert changed_wheels(PINS, {**PINS, "numpy-2-py3-none-any.whl": "3"}) == tuple(PINS)


def test_an_environment_is_the_base_of_another_only_with_the_same_python_and_system_packages() -> None:
    complete = '{"engines": ["tflite"], "extras": [], "wheels": {"edgert-1-py3-none-any.whl": "1"}, "edgert": "1"}'
    pyvenv = {"version": "3.11.2", "include-system-site-packages": "false", "home": "/usr/bin"}
    there = Installed.read(FIRST, complete, pyvenv)
    assert (there.engines, there.extras, there.base_for("3.11", ["tflite"])) == (("tflite",), (), there)
    assert not there.base_for("3.1", ["tflite"]).id
    assert not there.base_for("3.11", ["tflite", "tensorrt"]).id
    for damaged in ("", "[]", '{"wheels": []}', "{"):
        found = Installed.read(FIRST, damaged, pyvenv)
        assert (found.id, found.engines, found.base_for("3.11", ["tflite"]).id) == (FIRST, (), "")


def test_names_of_packages_are_normalized_like_in_pip() -> None:
    assert package_of("ai_edge_litert-2.1-cp311-cp311-linux_x86_64.whl") == "ai-edge-litert"


def test_an_engine_that_does_not_load_is_left_out_unless_exactly_these_engines_are_wanted(tmp_path: Path) -> None:
    fails = 'case "$*" in *tflite) echo "it crashed" >&2; exit 1 ;; esac'
    assert make_environment(run, environment(tmp_path / "a", fails)) == {
        "tflite": "engine tflite does not load: it crashed"
    }
    assert (tmp_path / "a/venvs" / NEW / ".complete").is_file()
    with pytest.raises(EngineMissing, match="it crashed"):
        make_environment(run, environment(tmp_path / "b", fails, exactly=True))
    assert not (tmp_path / "b/venvs" / NEW).exists()


def test_a_complaint_names_the_words_of_a_command_and_not_its_script() -> None:
    words = ("sh", "-c", "# A script of\nmany lines\n", "sh", "/a folder")
    assert Result(words, 1, "", "mkdir: Read-only file system\n").failure_text() == (
        "`sh -c sh '/a folder'` exited with 1: mkdir: Read-only file system"
    )
    assert Result(("pip", "install"), -1, "", "").failure_text() == "`pip install` was killed: no output"
    assert Result(("pip", "install"), -9, "", "").failure_text() == "`pip install` was killed by signal 9: no output"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_the_error_names_a_folder_that_is_mounted_noexec(tmp_path: Path) -> None:
    (noexec := tmp_path / "noexec").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", noexec], check=True)
    try:
        library = shutil.copy(a_library.__file__, noexec)
        load = f"import ctypes; ctypes.CDLL('{library}')"
        fails = f'case "$*" in *tflite) exec {sys.executable} -c "{load}" ;; esac'
        said = make_environment(run, environment(tmp_path / "home", fails))["tflite"]
        assert f"{tmp_path}/home is mounted noexec: remount it, or add the device again with --home" in said
    finally:
        subprocess.run(["umount", noexec], check=True)


def test_an_engine_gets_byte_code_although_the_daemon_sets_python_to_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    (code / "edgert").mkdir(parents=True)
    (code / "edgert/__init__.py").touch()
    (code / "edgert/engines.py").write_text("def engine_by_name(name):\n    import sdk\n    return sdk\n")
    (code / "sdk.py").write_text("def version():\n    return '1'\n")
    monkeypatch.chdir(code)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    new = environment(tmp_path / "a", f"""case "$*" in *null) exec '{sys.executable}' "$@" ;; esac""")
    assert make_environment(run, new) == {}
    assert Path(cache_from_source(str(code / "sdk.py"))).exists()


def test_an_environment_whose_wheels_pip_refuses_is_never_marked_as_complete(tmp_path: Path) -> None:
    new = environment(tmp_path / "a", 'case "$*" in *" install "*) echo "hashes do not match" >&2; exit 1 ;; esac')
    with pytest.raises(DeviceError, match="hashes do not match"):
        make_environment(run, new)
    assert not (tmp_path / "a/venvs" / NEW / ".complete").exists()
    assert (tmp_path / "a/venvs" / FIRST / ".complete").exists()


def test_the_error_of_a_self_test_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/edgertd"
    for text, why in (
        ("exit 0", ""),
        ("""echo '{"error": {"message": "wrong"}}'; exit 9""", "wrong"),
        ("exit 3", "exited with 3"),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        said = self_test(run, str(tmp_path), "/state", ["echo"])
        assert said == why or (why and why in said)


def test_the_release_of_an_environment_is_read_from_its_file(tmp_path: Path) -> None:
    assert release_in_use(tmp_path) is None
    (tmp_path / "release").write_text("7\n")
    assert release_in_use(tmp_path) == 7


def test_the_trial_of_a_runtime_begins_on_a_system_without_nohup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """busybox may lack nohup: an earlier version then waited ten minutes for a script that had not started."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "rm", "sleep"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "runtime.sh").write_text('kill -HUP $$; echo "$@" >"${0%/*}/words.new"; exec rm "${0%/*}/waiting"\n')
    (tmp_path / "waiting").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert run(trial_command(str(tmp_path), "/state", NEW, ["echo"], "monitor", 9.0), 20.0).ok
    monkeypatch.undo()
    wait_until(lambda: not (tmp_path / "waiting").exists(), "the script runs, whatever becomes of the session")
    assert (tmp_path / "words.new").read_text() == f"trial monitor /state 9 {NEW} echo\n"


def test_the_digest_of_code_follows_from_python_files_alone(tmp_path: Path) -> None:
    copy = shutil.copytree(CODE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "config.cpython-311.pyc").write_bytes(b"x")
    assert code_digest(copy) == code_digest(CODE)
    (copy / "config.py").write_text((copy / "config.py").read_text() + "\n")
    assert code_digest(copy) != code_digest(CODE)


@pytest.mark.parametrize("text", ["", "kept\n", "deferred\n2\n\n"], ids=["none", "cut-off", "unknown"])
def test_an_incomplete_or_unknown_outcome_is_read_as_no_outcome(text: str) -> None:
    assert RuntimeOutcome.read(text) == RuntimeOutcome()


def test_the_outcome_of_a_trial_has_its_runtime_and_its_reason() -> None:
    assert RuntimeOutcome.read(f"kept\n{NEW}\n\n") == RuntimeOutcome(RuntimeResult.KEPT, NEW)
    told = RuntimeOutcome.read(f"rolled-back\n{NEW}\nit is slow\n")
    assert told == RuntimeOutcome(RuntimeResult.ROLLED_BACK, NEW, "it is slow")
