"""A real pseudo-terminal for a command, and the screen that a person sees there."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte


class Terminal:
    """A command on its own terminal, below a line that the user wrote. `drawn` is its whole output."""

    def __init__(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], width: int = 120, height: int = 30
    ) -> None:
        self.drawn = b""
        self._ours, theirs = pty.openpty()
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)
        size = {"TERM": "xterm", "COLUMNS": str(width), "LINES": str(height)}
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        os.write(theirs, b"the user's own line\n")
        self.process = subprocess.Popen(
            argv, cwd=cwd, env={**env, **size}, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def lines(self) -> list[str]:
        """Return the lines of the screen that are not empty."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def read_until(self, shown: Callable[[list[str]], bool]) -> list[str]:
        """Read what the command draws until the screen fulfils `shown`; return its lines."""
        while not shown(self.lines()):
            chunk = os.read(self._ours, 65536)
            assert chunk, self.lines()
            self._feed(chunk)
        return self.lines()

    def _feed(self, chunk: bytes) -> None:
        self.drawn += chunk
        self._stream.feed(chunk)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> tuple[int, list[str]]:
        """Wait for the command's end; return its exit code and the last screen."""
        with contextlib.suppress(OSError):  # the other side is closed
            while chunk := os.read(self._ours, 65536):
                self._feed(chunk)
        os.close(self._ours)
        return self.process.wait(), self.lines()
