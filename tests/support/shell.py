"""The `edgert` command in a folder of its own: each time in a new process, or quicker in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from edgert_deploy.cli import main
from tests.support.paths import DIGITS, ROOT

EDGERT = (sys.executable, "-m", "edgert_deploy.cli")


class Shell:
    """Runs `edgert` in a folder of its own, with a home and configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy")]),
            "HOME": str(folder / "home"),
            "EDGERT_CONFIG_DIR": str(folder / "config"),
            "OPENBLAS_NUM_THREADS": "1",  # tests/conftest.py has the reason
        }

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*EDGERT, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.env,
            check=False,
        )

    def build(self, *words: str, **replaced: str | None) -> subprocess.CompletedProcess[str]:
        return self(*self.build_words(*words, **replaced))

    def build_words(self, *words: str, **replaced: str | None) -> list[str]:
        """Return an `edgert build` of the digits. `replaced` replaces options; None leaves an option out."""
        options: dict[str, str | None] = {
            "calibration": str(DIGITS / "calibration.npz"),
            "holdout": str(DIGITS / "holdout.npz"),
            "target": "this-machine",
            "engines": "first",
            "out": "digits.edgert",
            **replaced,
        }
        model = options.pop("model", None) or str(DIGITS / "digits.onnx")
        given = [word for key, value in options.items() if value is not None for word in (f"--{key}", value)]
        return ["build", model, *given, *words]

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"config", "home"}


class ShellHere(Shell):
    """Runs `edgert` in this process, because a new process takes seconds to import all modules."""

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {name: self.env[name] for name in ("HOME", "EDGERT_CONFIG_DIR")}
        return edgert_here(words, self.folder, **own, XDG_CACHE_HOME=None)


def edgert_here(words: Sequence[str], folder: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run `edgert WORDS` in this process, in `folder`; `variables` of the environment are set, or removed if None.

    Only one such command may run at a time.
    """
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name, value in variables.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def environment_of(tree: Path, **variables: str) -> dict[str, str]:
    """Return the environment in which Python finds the source tree `tree`, with `variables` set."""
    paths = [str(tree), str(tree / "deploy"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}


def edgert_apart(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `edgert WORDS` in a process of its own, in `folder`."""
    return subprocess.run(
        [*EDGERT, *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env=environment,
        check=False,
    )


def code_of(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert error["message"]
    return str(error["code"])
