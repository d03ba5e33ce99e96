"""A build's progress on a terminal: bars that leave alone everything that was printed above them."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pyte
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.support.shell import MAIN, Shell

WIDTH, HEIGHT = 120, 30


def test_the_table_and_the_lines_above_it_stay_on_the_screen(shell: Shell) -> None:
    words = shell.build_words("--engines", "first", "--target", "jetson-orin-nano")
    ours, theirs = pty.openpty()
    env = {**shell.env, "TERM": "xterm", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
    os.write(theirs, b"the user's own line\n")
    build = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], cwd=shell.folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    drawn = b""
    with contextlib.suppress(OSError):  # the terminal ends with the last process that has it
        while chunk := os.read(ours, 65536):
            drawn += chunk
            stream.feed(chunk)
    os.close(ours)
    assert build.wait() == 0
    assert "━" in drawn.decode()
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert [line.split()[0] for line in lines] == ["the", "target", "this-machine", "jetson-orin-nano", "digits.edgert:"]
    assert lines[0] == "the user's own line"
    assert all(line.endswith("pass") for line in lines[2:4])
