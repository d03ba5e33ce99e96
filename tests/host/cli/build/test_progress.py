"""The progress bars of a build on a terminal do not erase lines above them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.support.shell import EDGERT, Shell
from tests.support.terminals import Terminal


def drawn_on(ours: int) -> bytes:
    """Return all output to a terminal until every process has closed it."""
    drawn = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            drawn += chunk
    os.close(ours)
    return drawn


def test_the_progress_bars_erase_neither_the_table_nor_the_lines_above_it(shell: Shell) -> None:
    words = shell.build_words("--target", "jetson-orin-nano")
    terminal = Terminal([*EDGERT, *words], shell.folder, shell.env)
    code, lines = terminal.end()
    assert code == 0
    assert "━" in terminal.drawn.decode()
    assert [line.split()[0] for line in lines] == [
        "the",
        "target",
        "this-machine",
        "jetson-orin-nano",
        "digits.edgert:",
    ]
    assert lines[0] == "the user's own line"
    assert all(line.endswith("pass") for line in lines[2:4])


def test_stdout_contains_only_the_result(shell: Shell) -> None:
    ours, theirs = pty.openpty()
    words = shell.build_words("--json")
    env = {**shell.env, "TERM": "xterm", "COLUMNS": "120"}
    build = subprocess.Popen([*EDGERT, *words], cwd=shell.folder, env=env, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = drawn_on(ours)
    stdout, _ = build.communicate()
    assert build.returncode == 0
    assert json.loads(stdout)["targets"][0]["passed"]
    for words_shown in ("this-machine", "building onnxruntime int8", "judging the artifact", "left", "done", "━"):
        assert words_shown in shown.decode()
